"""`vesuvius doctor`: is this machine fit for a run?  Each check is a function; examination.py puts them in order."""

"""`vesuvius doctor`: is this machine fit for a run?  In: the machine, and a config if there is one.  Out: findings.

Each check is a function; examination.py puts them in order."""

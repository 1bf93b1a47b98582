"""`vesuvius report`: what a run recorded.  In: run directories.  Out: one HTML page."""

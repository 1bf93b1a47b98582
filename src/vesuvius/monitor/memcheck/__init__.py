"""A run seen from another process.  In: a run directory or a PID.  Out: a table of its memory and its risk."""

"""Inspects a run from another process.  In: a run directory or a PID.  Out: a table of its memory and risk."""

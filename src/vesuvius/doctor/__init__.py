"""`vesuvius doctor` checks whether this machine is ready for a run.  In: machine, config if any.  Out: findings.

Each check is a function; examination.py runs them."""

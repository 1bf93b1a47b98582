"""A training run.  In: a config.  Out: a run directory with logs and checkpoints.  `run.py` is the loop."""

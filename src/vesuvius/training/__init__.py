"""A training run.  In: a config.  Out: a run directory with logs and checkpoints.

run.py prepares and ends a session, loop.py contains its steps.
"""

"""Starts the ranks of a run.  In: a config.  Out: an exit code of `training.run.train`, called once in each rank."""

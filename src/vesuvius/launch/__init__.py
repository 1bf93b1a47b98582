"""Starts the ranks of a run.  In: a request.  Out: the exit code of `training.run.train_as_rank`, run in each rank."""

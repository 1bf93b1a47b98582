"""The trainer processes (ranks) of a run.  In: the environment of torchrun or Ray Train.  Out: `Ranks`."""

"""The trainer processes of one run.  In: the environment of torchrun or Ray Train.  Out: `Ranks`, how they agree."""

"""Checkpoints.  In: the training state.  Out: directories that are complete or absent, and the state again."""

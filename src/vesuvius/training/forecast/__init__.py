"""Before a run starts.  In: a config.  Out: an error, or the predicted work, time and memory."""

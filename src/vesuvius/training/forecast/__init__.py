"""Before anything runs.  In: a config.  Out: an error, or what the run will do and how much memory it will take."""

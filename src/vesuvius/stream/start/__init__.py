"""Before the first batch.  In: a config.  Out: open volumes and the plan."""

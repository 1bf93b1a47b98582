"""Before the first batch.  In: a config.  Out: open volumes, the plan, the fixed patches of validation."""

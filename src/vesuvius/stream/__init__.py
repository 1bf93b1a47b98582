"""From the plan to batches in the stored dtype.  In: a plan and volumes.  Out: ordered batches.

Only `ray` imports Ray."""

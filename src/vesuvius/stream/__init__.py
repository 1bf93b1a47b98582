"""From the plan to batches in their stored dtype.  In: a plan and volumes.  Out: ordered batches.

`ray` alone imports Ray."""

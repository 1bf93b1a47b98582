"""`vesuvius plan`.  In: a config and machines.  Out: reads, data wait, hours and money of a run on them."""

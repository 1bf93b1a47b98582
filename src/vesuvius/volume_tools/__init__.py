"""The `vesuvius volume` commands: info, copy, occupancy, verify, import and the synthetic scroll.

In: an address.  Out: facts, a list of broken chunks, or a volume on disk."""

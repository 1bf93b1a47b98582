"""A trial: the real trainer as a process of its own, measured by what it writes."""

"""How close memory is to a limit.  In: system samples.  Out: growth, the limit that is hit first, what to do.  Pure."""

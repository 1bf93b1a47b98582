"""How close memory is to a limit.  In: system samples.  Out: growth, the first limit, orders of the guard.  Pure."""

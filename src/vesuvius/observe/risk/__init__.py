"""How near memory is to its end: growth, who would kill first, and what to do before.  Pure."""

"""After a kill: the evidence, the cause and the remedy."""

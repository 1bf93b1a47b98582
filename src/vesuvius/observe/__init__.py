"""Clocks, logs and memory readers.  The training loop calls them; they know nothing of the loop."""

"""`vesuvius bench`: settings side by side.  grid.py says what, rounds.py in which order, results.py what it came to."""

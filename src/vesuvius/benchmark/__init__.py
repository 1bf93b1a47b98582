"""`vesuvius bench`: settings side by side.  grid.py says what, ledger.py in which order, results.py what it came to."""

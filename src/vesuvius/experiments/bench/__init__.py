"""`vesuvius bench`: settings side by side.  In: a config and the axes to vary.  Out: a ledger and a page.

cells.py lists what is measured, measure.py measures one cell once, results.py
compares, page.py writes."""

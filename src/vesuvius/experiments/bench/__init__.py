"""`vesuvius bench`: settings side by side.  In: a config and the axes to vary.  Out: a ledger and a page.

results.py lists what is measured and compares, measure.py measures one cell once, page.py writes."""

"""`vesuvius bench`: settings side by side.  In: a config and the axes to vary.  Out: a page and its figures.

results.py lists what is measured, compares and makes the page (pure); session.py measures."""

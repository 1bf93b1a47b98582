"""`vesuvius bench`: settings side by side.  In: a config and the axes to vary.  Out: a ledger, a page with pictures.

grid.py lists the cells, ledger.py keeps what was measured, results.py compares."""

"""`vesuvius bench`: settings side by side.  In: a config and the axes to vary.  Out: a page and its figures."""

"""`vesuvius profile`: where the time of a step goes.  In: a config, or a run that trains.  Out: a page, a trace.

session.py trains some steps, page.py says what they showed."""

"""`vesuvius profile`: where the time of a step goes.  session.py trains some steps, page.py says what they came to."""

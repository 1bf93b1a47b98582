"""`vesuvius report`: what a run recorded, as one page."""

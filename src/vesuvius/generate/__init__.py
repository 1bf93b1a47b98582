"""A trained network at work.  In: a checkpoint.  Out: samples on disk, pictures, and how real they look."""

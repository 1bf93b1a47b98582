"""Sampling from a trained network.  In: a checkpoint.  Out: samples on disk, pictures, and how real they look."""

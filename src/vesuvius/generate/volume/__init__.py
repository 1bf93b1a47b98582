"""Volumes larger than memory: overlapping tiles, one sampler step at a time, all state on disk.

In: a trained network, a shape, a condition, known voxels.  Out: an OME-Zarr volume.
"""

"""Volumes larger than memory: overlapping tiles, one sampler step at a time, all state on disk."""

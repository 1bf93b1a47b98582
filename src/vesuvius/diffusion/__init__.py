"""Batch of patches -> loss, and noise -> sample: schedule, loss, sampler, randomness, network.  No files, no Ray.

Each name is imported from its own module; importing this package alone does not import torch.
"""

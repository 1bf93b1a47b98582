"""The diffusion model: noise schedule, loss, samplers, randomness, network.  No files, no Ray.

In: a batch of patches, or noise.  Out: a loss, or samples.  Import each name from its module; importing the package
alone does not import torch.
"""

"""From ordered batches of voxels to tensors where the model is.  In: volumes.  Out: what a training loop takes."""

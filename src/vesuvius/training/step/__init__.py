"""One optimizer step.  In: a batch of voxels in their stored dtype.  Out: updated weights, the loss, timings."""

"""From ordered batches of voxels to tensors on the device.  In: volumes.  Out: batches for a training loop."""

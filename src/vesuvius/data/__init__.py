"""From voxels on disk to batches in their stored dtype.  Nothing here knows the model."""

"""Which voxels sample i is.  In: shapes, splits, foreground maps.  Out: volume, region, start and augmentation.

Pure."""

"""Which voxels sample i is.  In: shapes, splits, foreground maps.  Out: volume, region, start and augmentation.

Pure, but for `occupancy`, which reads what a foreground map is made of."""

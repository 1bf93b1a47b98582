"""Maps sample i to voxels.  In: shapes, splits, foreground maps.  Out: volume, region, start, augmentation.  Pure."""

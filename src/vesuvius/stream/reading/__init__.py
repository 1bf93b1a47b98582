"""A reader process.  In: tasks of regions.  Out: blocks of voxels, and reports of damage."""

"""A reader process.  In: tasks of regions.  Out: blocks of voxels, and what could not be read."""

"""From stored bytes to voxels: stores, cache, chunks, volumes.  In: an address.  Out: boxes of voxels (z, y, x).

Usable without training; independent of the plan."""

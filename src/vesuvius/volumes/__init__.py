"""From stored bytes to voxels: sources, cache, chunks, volumes.  In: an address.  Out: boxes of voxels (z, y, x).

Usable without training; knows no plan."""

"""Any network on the tiles of a volume of any size: the engine, whole-volume prediction, grids of patches."""

"""How near generated patches come to real ones.  In: arrays of patches, a volume.  Out: figures with floors, a page."""

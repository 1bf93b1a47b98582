"""How close generated patches come to real ones.  In: patches, a volume.  Out: metrics with floors, a page."""

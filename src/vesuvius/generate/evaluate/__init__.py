"""How close generated patches are to real ones.  In: patches, a volume.  Out: metrics with floors, a page."""

"""How close generated patches come to real ones.  In: patches, a volume.  Out: figures with floors, a page."""

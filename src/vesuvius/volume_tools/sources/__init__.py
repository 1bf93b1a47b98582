"""Scans that are no zarr, for `vesuvius volume import`.  In: files of other formats.  Out: boxes of voxels (Z, Y, X).

files.py and slices.py open arrays with a letter for each axis; source.py makes a volume of one.  A format's library is
imported when one of its files is opened.
"""

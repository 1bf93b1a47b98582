"""Reads scans in other formats than zarr, for `vesuvius volume import`.  In: files.  Out: boxes of voxels (Z, Y, X).

containers.py, dicom.py, files.py, medical.py and slices.py open arrays with a letter for each axis; source.py turns one
into a volume.  The library of a format is imported when one of its files is opened.
"""

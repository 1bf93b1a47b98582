"""What the system says: processes, cgroups, machine, GPUs.  Reads and adds up; judges nothing.

Nothing here needs more than the standard library (and nvidia-ml-py for GPUs, where it is installed), so that
`tools/memcheck.py` can watch a run from a bare Python.
"""

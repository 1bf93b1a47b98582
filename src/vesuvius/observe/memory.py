"""The unit that memory is shown in."""

GIB = 2**30

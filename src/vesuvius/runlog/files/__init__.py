"""Files that survive a crash: appended to, replaced as a whole, locked.  In: bytes or lines.  Out: a file."""

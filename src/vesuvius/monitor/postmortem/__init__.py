"""After a process was killed.  In: the kernel's counts of kills, Ray's account, the last samples.  Out: cause and remedy."""

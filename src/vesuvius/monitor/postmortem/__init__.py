"""After a process was killed.  In: kill counts, Ray's account, the last samples.  Out: the cause and a remedy."""

"""After a process was killed.  In: kernel logs, counters, the last samples.  Out: the cause and a remedy."""

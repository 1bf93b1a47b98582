"""The run directory and all that is written there.  In: records and log lines.  Out: files that survive a kill."""

"""The words of a tune: settings, trials and what came of them, what may be tried.  No I/O."""

"""One module per command.  In: a command line.  Out: printed text and an exit code; the work is done elsewhere."""

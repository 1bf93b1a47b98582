"""What an operator has to know at once.  In: system samples, disk use, signs of progress.  Out: log lines, records.

GPU and process troubles, a disk that will be full, a run that hangs."""

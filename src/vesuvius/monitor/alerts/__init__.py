"""What an operator has to know at once.  In: system samples, signs of progress.  Out: log lines, records."""

"""Tuning by short trial runs.  In: a config and a time budget.  Out: a report, a tuned config."""

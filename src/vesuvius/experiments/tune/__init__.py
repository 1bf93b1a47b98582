"""Tuning by short trial runs.  In: a config and a time budget.  Out: trials in a ledger, a report, a tuned config."""

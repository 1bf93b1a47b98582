"""What to try next, and what it should take: a pure function of the ledger."""

"""The search policy.  In: the ledger.  Out: the next trial, or the recommendation.  Pure."""

"""`vesuvius tune`: one change at a time, each tried by a short real run, until the run is as fast as this machine can.

    Space, ledger -> policy.propose -> Trial -> runner -> Outcome -> ledger -> ... -> Stop -> report, tuned config

The policy is pure: what it proposes follows from the ledger alone, so that an interrupted tune goes on where it was.
"""

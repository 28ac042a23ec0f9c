"""A long run of random load under random faults: `python -m tests.support.soak --minutes 30`. Real
daemons, drivers in processes of their own, and a ledger on disk that says at the end whether every
accepted request ended once, with the right tokens."""

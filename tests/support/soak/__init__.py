"""A long run of random load under random faults: `python -m tests.support.soak --minutes 30`. Real
daemons, drivers in separate processes, and a ledger on disk that shows whether every accepted
request ended once with the right tokens."""

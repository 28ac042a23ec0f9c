"""A step on its way to the daemons and back. In reading order:

slots.py              SlotTable: encodes a step; requests become slots, and only changes are sent
step_checks.py        what a step must fulfill; each check returns the first fault (step_fault.py)
sent_counts.py        what the daemons know of each request's tokens
block_tables.py       which blocks they know of each request; block_holders.py, cached_blocks.py
masks.py              masks of a step's requests, and what is sampled later (deferred_sampling.py)
encoded_step.py       a step as sent, and its reply in terms of requests
"""

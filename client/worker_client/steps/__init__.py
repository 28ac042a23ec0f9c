"""A step on its way to the daemons and back. In reading order:

slots.py              SlotTable: requests become slots (assignment.py), and only changes are sent
steady_steps.py       a step that goes on as the one before; changed_step.py: any other
step_checks.py        what a step must fulfill; each check returns the first fault (step_fault.py).
                      The last one, encode_checked, encodes
sent_counts.py        what the daemons know of each request's tokens
block_tables.py       which blocks they know of each request; block_holders.py, cached_blocks.py
step_values.py        values of optional features, by slot
deferred_sampling.py  requests that are sampled later; masks.py: grammars' masks
encoded_step.py       a step once it is encoded; reads its reply
lockstep.py           the rows of replicas that take each step together; lockstep_step.py
"""

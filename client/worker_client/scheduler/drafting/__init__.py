"""The parts of DraftLengths (../draft_lengths.py), each the owner of its state: what has been
accepted (acceptance.py), what steps take (step_costs.py), when it is tried what else may pay
(probes.py), whether the device rests (device_rest.py), and what has changed for good (payoffs.py).
And the drafts of one request (request_drafts.py), with those that it expects (expected_drafts.py).
"""

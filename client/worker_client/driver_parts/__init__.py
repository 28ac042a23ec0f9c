"""Optional features of a driver. In reading order:

interface.py         DriverPart: the calls of a driver to its features; plan adds values to a step
context.py           the driver as they see it
registry.py          the list of the features, and their options
live_requests.py     the requests of a driver; driver_parts.py: its features, asked in their order
request_uploads.py   uploads of requests
weights.py           the version of the weights; experts.py: experts that move between steps
kept_prefixes.py     cached prefixes that outlive their driver; host_tier.py: those in host memory
remote_prefill.py    prompts that another group computes

Those of structured output are in structured/driver_parts.py.
"""

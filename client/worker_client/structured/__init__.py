"""Structured output: a request's grammar as a caller gives it (options.py), grammars compiled by
llguidance (grammars.py), requests that wait for theirs (pending.py), and the masks of a driver's
steps (masked_steps.py). docs/structured-output.md explains the design."""

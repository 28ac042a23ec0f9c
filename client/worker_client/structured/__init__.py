"""Structured output: grammars, and where the work for them is done (grammars.py, trials.py,
serving.py, matchers.py), the process that does it with llguidance (mask_process.py, text_tokens.py,
mask_messages.py), requests that wait for theirs (pending.py), and the masks of a driver's steps
(masked_steps.py). docs/structured-output.md explains the design."""

"""Structured output; docs/structured-output.md explains the design. In reading order:

driver_parts.py    its calls from the driver: where masks enter steps
pending.py         requests that wait for their grammars
masked_steps.py    the masks of a driver's steps, and when each is sent
masked_rows.py     a request there: its matchers, and the masks of its next tokens
prompt_lookup.py   guesses of these, from the request's text
jump_forward.py    tokens about which a grammar leaves no choice
grammars.py        grammars, and where the work for them is done; opening.py: those of a model
trials.py          compiles a grammar for the first time; serving.py, matchers.py: its masks
mask_process.py    the process that computes masks with llguidance; text_tokens.py,
                   mask_messages.py
"""

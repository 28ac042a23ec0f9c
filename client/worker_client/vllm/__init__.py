"""vLLM's scheduler and server as a driver of worker daemons; docs/vllm.md has the user's side.

`hooks/` has the classes that vLLM loads: the platform (where WORKER_DAEMON_ENDPOINTS is set),
executor and scheduler. The rest translates, and is tested without vLLM: `settings.py`,
`configuration.py`, `sections.py` (which fields of it may differ from vLLM's defaults),
`requests.py` (a request's fields), `embedded_prompts.py` (its embeddings), `steps.py` (a step),
`outputs.py` (its result), `operations.py` (calls by name), `workers.py` (the group, and what
becomes of a lost step), `refusals.py` (why a server ends at its start).
"""

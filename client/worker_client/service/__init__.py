"""`worker-client serve`: an OpenAI-compatible server, with the extra `service`. In reading order:

settings.py     what can be set; access.py, key_files.py: keys
app.py          the application: its endpoints, and what each request passes before them
admission.py    bounds on what is unfinished; fields.py: bodies, read field by field
engine.py       the driver, tokenizer and models; options.py, generation_defaults.py: sampling
completions.py  /v1/completions; models.py: /v1/models; tokens.py; admin.py, operations.py
chat.py         /v1/chat/completions (chat_*.py, tool_*.py); embeddings.py, scores.py (pooled.py)
health.py       probes and /metrics; metrics/: what is counted, and how it is called
streaming.py    answers, whole or as server-sent events; errors.py: OpenAI's error object
logprobs.py     log probabilities in the form of completions; token_texts.py; routed_experts.py
server.py       the process, its socket, signals and drain
"""

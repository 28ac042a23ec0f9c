"""Texts, messages, JSON, tensors and files of callers, checked and turned into requests.

sampling_params.py  sampling options of a request; a new one: docs/adding-a-feature.md
request_checks.py   requests, checked whole; request_fields.py: values as the types of fields
request_parser.py   requests in JSON
tokenizer.py        text to tokens and back, in other processes (tokenizer_process.py, job_pool.py)
token_bytes.py      bytes of single tokens
chat_template.py    messages to text, in other processes (template_process.py)
text_stream.py      text of a request while its tokens come; stop_strings.py: where it ends
prompt_embeds.py    prompts with embeddings; embeds_files.py, host_tensor.py
grammar_options.py  structured output, as callers ask for it
child_process.py    processes that are killed when their work takes too long
"""

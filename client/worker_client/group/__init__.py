"""One group of daemons, which worker_group.py shows to callers. In reading order:

group_channel.py    requests to all ranks, and their replies; gathering.py, group_daemons.py
outcomes.py         the futures of steps, and which of them fail
failure_state.py    the table of what can fail and what follows; weights_state.py for weights
attaching.py        takes the lease of every rank
loading.py          loads models; load_chain.py, kv_planning.py, saves.py: its phases
replacement.py      replaces a lost rank; resending.py, sent_steps.py: steps that are sent again
adoption.py         requests that an earlier driver has left running
group_adapters.py   LoRA adapters; uploading.py: tensors of requests; block_notes.py: kept prefixes
"""

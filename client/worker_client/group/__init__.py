"""One group of daemons, which worker_group.py shows to callers. In reading order:

group_channel.py    requests to all ranks, replies, dead ranks; gathering.py, group_daemons.py
outcomes.py         the futures of steps, and which of them fail; waiting.py: waits for them
failure_state.py    the table of what can fail and what follows; wire/liveness.py notices deaths
attaching.py        takes the lease of every rank; together.py: of several groups at once
loading.py          loads models; load_chain.py, kv_planning.py: its phases
replacement.py      replaces a lost rank; resending.py, sent_steps.py: steps that are sent again
adoption.py         requests that an earlier driver has left running
weights.py          updates; weights_state.py, lora_update.py, recomputing.py, saving.py
experts.py          balances experts; expert_placement.py: the policy, expert_loads.py
Others that `WorkerGroup` names: memory, loras, uploads, prefixes, profiling, kv_transfers (.py)
"""

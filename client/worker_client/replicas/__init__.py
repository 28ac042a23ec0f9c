"""Several groups as one. Data parallelism: each replica is a WorkerGroup, but all replicas in
lockstep are one.

group.py      attaches to the daemons of all replicas, loads them, and does one operation on all
opening.py    opens what a command drives, on running daemons or its own
loras.py      adapters that all replicas have
lockstep.py   schedules the requests of replicas that take each step together
driver.py     serves an asyncio program's requests, each on one replica
placement.py  chooses the replica of a request
operations.py  does what administrators want to all replicas, also to one that is lost

prefill_group.py, prefill_serving.py  a group that computes prompts for another one, on a thread
"""

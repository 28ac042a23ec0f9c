"""The scheduler interface, and the reference scheduler behind it, to be copied from. To be read as

interface.py       what a driver asks of a scheduler, and the values that they exchange
reference.py       Scheduler: takes the calls, commits steps, takes in their results
plan/planning.py        decides a step: decodes, prefill chunks, preemption, admission
roster.py          who waits and who runs
decode_groups.py   who decodes together, so that the stages work on different requests
request.py         one request: its counts, when it ends, where it comes from
request_blocks.py  which blocks requests hold, and what of them is shared; over block_pool.py
"""

from worker_client.scheduler.interface import FinishReason as FinishReason
from worker_client.scheduler.interface import RequestOutput as RequestOutput
from worker_client.scheduler.interface import SchedulerInterface as SchedulerInterface
from worker_client.scheduler.interface import SchedulerLimits as SchedulerLimits
from worker_client.scheduler.interface import scheduler_limits as scheduler_limits
from worker_client.scheduler.reference import Scheduler as Scheduler

"""The scheduler interface, and a reference scheduler to copy from. In reading order:

interface.py       the calls of a driver to a scheduler, and the values that they exchange
reference.py       Scheduler: takes the calls, commits steps
planning.py        decides a step: decodes, chunks, preemption, admission; step_room.py: its bytes
open_steps.py      numbers the steps; step_budget.py: bounds their prompt tokens by a latency target
step_results.py    gives requests what steps have sampled; request_exits.py ends or preempts them
request_queues.py  waiting and running requests; decode_groups.py: those that decode together
request.py         one request; new_requests.py starts it, admissions.py admits it on the workers;
                   reported.py, experts_record.py, weights_history.py: what else it keeps
request_blocks.py, prefix_search.py, prefix_cache.py  blocks that requests hold, find and share
sampling_weights.py, adapter_updates.py  weights that sample, and updates of adapters' weights
"""

from worker_client.requests import FinishReason as FinishReason
from worker_client.requests import RequestOutput as RequestOutput
from worker_client.requests import failed_request as failed_request
from worker_client.scheduler.interface import NO_JUMP as NO_JUMP
from worker_client.scheduler.interface import AdaptingScheduler as AdaptingScheduler
from worker_client.scheduler.interface import ContinuingScheduler as ContinuingScheduler
from worker_client.scheduler.interface import EndingScheduler as EndingScheduler
from worker_client.scheduler.interface import ExpectingScheduler as ExpectingScheduler
from worker_client.scheduler.interface import HoldingScheduler as HoldingScheduler
from worker_client.scheduler.interface import Jump as Jump
from worker_client.scheduler.interface import JumpingScheduler as JumpingScheduler
from worker_client.scheduler.interface import PausingScheduler as PausingScheduler
from worker_client.scheduler.interface import RecomputingScheduler as RecomputingScheduler
from worker_client.scheduler.interface import SchedulerInterface as SchedulerInterface
from worker_client.scheduler.interface import SchedulerLimits as SchedulerLimits
from worker_client.scheduler.interface import SuspendingScheduler as SuspendingScheduler
from worker_client.scheduler.interface import VersionedScheduler as VersionedScheduler
from worker_client.scheduler.interface import scheduler_limits as scheduler_limits
from worker_client.scheduler.reference import Scheduler as Scheduler
from worker_client.scheduler.request_queues import Urgency as Urgency
from worker_client.scheduler.request_queues import by_priority as by_priority

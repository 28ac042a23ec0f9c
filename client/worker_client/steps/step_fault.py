"""A fault of a step as a value: what is wrong with which field, and the fix. Checks return faults,
and change nothing; refuse() is the one place that raises them."""

from collections.abc import Iterable
from typing import NoReturn

from worker_client.errors import InvalidSchedulerOutput
from worker_client.scheduler_output import StepFault as StepFault


def refuse(fault: StepFault) -> NoReturn:
    """Raise a fault as InvalidSchedulerOutput."""
    raise InvalidSchedulerOutput(
        fault.message, field=fault.field, value=fault.value, fix=fault.fix, req_id=fault.req_id
    )


def malformed(field: str, value: object, fix: str) -> StepFault:
    """Return the fault of a field of the wrong type or size."""
    return StepFault("the step is malformed", field, value, fix)


def wrong_ids(message: str, field: str, req_ids: Iterable[object]) -> StepFault:
    """Return the fault of a step that these requests cannot be in; names the first."""
    fix = "name each request in one part of a step, and only while it has a slot"
    req_id = next(iter(req_ids), "")
    return StepFault(message, field, req_id, fix, req_id)


def wrong_count(req_id: str, count: object, fix: str) -> StepFault:
    """Return the fault of a request's number of tokens."""
    message = "it cannot have this many tokens in this step"
    return StepFault(message, "num_scheduled_tokens", count, fix, req_id)


def wrong_block(req_id: str, block_id: object, fix: str, field: str = "block_ids") -> StepFault:
    """Return the fault of one of a request's blocks."""
    return StepFault("it cannot have this block", field, block_id, fix, req_id)


def not_running(req_id: str, block_ids: object) -> StepFault:
    """Return the fault of blocks for a request that is new or does not continue."""
    fix = "append blocks to running requests; a new one has its own list"
    return wrong_block(req_id, block_ids, fix, "new_block_ids")

"""A driver of the copy: serves the requests of a plan (JSON, a line on stdin), or continues
those of an earlier driver, and prints the results. Dies as the plan says."""

import os
from dataclasses import dataclass, replace
from typing import Any

import msgspec
import numpy as np
from forked_drivers import fork_each
from plans import Outcome, Plan, Wanted
from rpc_schema.random_refusals import RandomRefusals

from worker_client.driver import Driver
from worker_client.group.outcomes import StepFuture
from worker_client.requests import GenerationRequest, SamplingParams
from worker_client.scheduler import Scheduler, scheduler_limits
from worker_client.scheduler_output import SchedulerOutput, StepResult
from worker_client.steps.masks import StepMasks
from worker_client.worker_group import WorkerGroup


@dataclass
class TwoFutures:
    """The futures of a step that defers its sampling, and of the request that samples it."""

    deferred: StepFuture
    sampled: StepFuture

    def result(self) -> StepResult:
        """Return the sampled tokens."""
        assert not self.deferred.result().req_ids
        return self.sampled.result()


class DeferringGroup:
    """A group whose steps all defer their sampling."""

    def __init__(self, group: WorkerGroup, dies_after: int | None) -> None:
        self._group = group
        self.max_in_flight = group.max_in_flight // 2
        self._dies_after = dies_after
        self._num_steps = 0

    def execute_model(self, output: SchedulerOutput) -> TwoFutures:
        """Send a step, and immediately the request that samples it."""
        req_ids = (*output.decode_req_ids, *output.num_scheduled_tokens)
        deferred = self._group.execute_model(
            replace(output, extensions=(StepMasks(deferred=req_ids),))
        )
        self._num_steps += 1
        if self._num_steps == self._dies_after:
            deferred.result()
            os._exit(9)
        assert deferred.step is not None
        sampled = self._group.sample_tokens(deferred) if deferred.step.deferred else deferred
        return TwoFutures(deferred, sampled)

    def withdraw(self, output: SchedulerOutput) -> frozenset[str]:
        """Withdraw like the group."""
        return self._group.withdraw(output)


def as_request(wanted: Wanted) -> GenerationRequest:
    """Return a driver's request."""
    percent = wanted.percent
    return GenerationRequest(
        id=wanted.id,
        prompt=np.array(wanted.prompt, np.int32),
        max_tokens=wanted.max_tokens,
        sampling=SamplingParams(ignore_eos=True),
        features=(RandomRefusals(percent=percent),) if percent else (),
    )


def run(line: str) -> bytes:
    """Live by a plan; return the outcome."""
    plan = msgspec.json.decode(line, type=Plan)
    num_results = num_refused = 0

    def hear(result: Any) -> None:
        nonlocal num_results, num_refused
        num_results += 1
        num_refused += sum(result.refused.values())
        if num_results == plan.dies_after and not plan.defers:
            os._exit(9)

    with WorkerGroup(plan.endpoints, plan.config.parallel) as group:
        group.attach(keep_requests=plan.adopt)
        loaded = group.prepare(
            plan.config, num_gpu_blocks=plan.num_gpu_blocks, reload=not plan.adopt
        )
        scheduler = Scheduler(scheduler_limits(loaded, plan.config))
        adopted = group.adopt_requests() if plan.adopt else []
        outputs = scheduler.adopt_requests(adopted) if adopted else []
        known = {request.req_id for request in adopted}
        taking = DeferringGroup(group, plan.dies_after) if plan.defers else group
        driver = Driver(taking, scheduler, on_result=hear)
        for wanted in plan.wanted:
            if wanted.id not in known:
                driver.add_request(as_request(wanted))
        outputs = [*outputs, *driver.run()]
        preemptions = sum(output.num_preemptions for output in outputs)
        tokens = {output.req_id: output.token_ids for output in outputs}
    num_warm = sum(request.num_computed_tokens > 0 for request in adopted)
    num_groups = len(loaded.groups)
    outcome = Outcome(len(adopted), num_warm, num_groups, preemptions, num_refused, tokens)
    return msgspec.json.encode(outcome)


if __name__ == "__main__":
    fork_each(run)

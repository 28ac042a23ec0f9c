"""A driver of the copy: serves the requests of a plan (JSON, a line on stdin), or continues
those of an earlier driver, and prints the results. Dies as the plan says."""

import os
from typing import Any

import msgspec
import numpy as np
from forked_drivers import fork_each
from plans import Checked, Outcome, Plan, Wanted
from rpc_schema.checked_tokens import CheckedTokens
from rpc_schema.token_bias import TokenBias

from worker_client.driver import Driver
from worker_client.errors import RequestError
from worker_client.requests import GenerationRequest, SamplingParams
from worker_client.scheduler import Scheduler, scheduler_limits
from worker_client.worker_group import WorkerGroup


def as_request(wanted: Wanted) -> GenerationRequest:
    """Return a driver's request."""
    features: list[TokenBias | CheckedTokens] = []
    if wanted.bias is not None:
        features.append(TokenBias(token_id=wanted.token_id, bias=wanted.bias))
    if wanted.num_checked:
        features.append(CheckedTokens(count=wanted.num_checked))
    return GenerationRequest(
        id=wanted.id,
        prompt=np.array(wanted.prompt, np.int32),
        max_tokens=wanted.max_tokens,
        sampling=SamplingParams(ignore_eos=True),
        features=tuple(features),
    )


def run(line: str) -> bytes:
    """Live by a plan; return the outcome."""
    plan = msgspec.json.decode(line, type=Plan)
    num_results = 0
    lengths = {wanted.id: len(wanted.prompt) for wanted in plan.wanted}
    checked: list[Checked] = []

    def hear(result: Any) -> None:
        nonlocal num_results
        num_results += 1
        for req_id, samples in result.samples.items():
            tokens = [sample.token_id for sample in samples]
            checked.append(Checked(req_id, lengths[req_id], tokens))
        for req_id in result.req_ids:
            lengths[req_id] += 1
        if num_results == plan.dies_after:
            os._exit(9)

    with WorkerGroup(plan.endpoints, plan.config.parallel) as group:
        group.attach(keep_requests=plan.adopt)
        loaded = group.prepare(
            plan.config, num_gpu_blocks=plan.num_gpu_blocks, reload=not plan.adopt
        )
        scheduler = Scheduler(scheduler_limits(loaded, plan.config))
        adopted = group.adopt_requests() if plan.adopt else []
        outputs = scheduler.adopt_requests(adopted) if adopted else []
        known = {request.req_id: len(request.token_ids) for request in adopted}
        lengths |= known
        driver = Driver(group, scheduler, on_result=hear)
        for wanted in plan.wanted:
            if wanted.id not in known:
                driver.add_request(as_request(wanted))
        try:
            driver.add_request(as_request(Wanted("many", [1], 1, 0, None, num_checked=200)))
        except RequestError as error:
            refusal = f"{error.field} {error.value}: {error.fix}"
        outputs = [*outputs, *driver.run()]
        preemptions = sum(output.num_preemptions for output in outputs)
        tokens = {output.req_id: output.token_ids for output in outputs}
    return msgspec.json.encode(Outcome(len(adopted), preemptions, tokens, checked, refusal))


if __name__ == "__main__":
    fork_each(run)

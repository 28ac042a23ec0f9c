"""Ranks that die: the driver knows who, the survivors are free and keep what they have, another
daemon takes the place, and every request ends with the tokens of an undisturbed run."""

import time

import pytest

from client.driver import Driver
from client.errors import ReplacementFailed, WorkerDied
from client.scheduler import Scheduler
from tests.support.driving import random_cases
from tests.support.serving import connect, generate, scheduler_limits, worker_config

STEP_DEADLINE_MS = 2000
SHAPES = [(2, 1), (1, 2)]


@pytest.mark.parametrize(("pp", "tp"), SHAPES)
@pytest.mark.parametrize("rank", [0, 1])
def test_killed_rank_is_replaced_under_load(supervised, checkpoint, detection, pp, tp, rank):
    daemons = supervised(2)
    cases = random_cases(checkpoint(), seed=50 + rank, count=6, max_tokens=32)
    config = worker_config(checkpoint().path, pp, tp, step_deadline_ms=STEP_DEADLINE_MS)
    with connect(daemons.endpoints, config) as (group, loaded):
        before = group.get_status()[1 - rank]
        killed = []
        noticed = []

        def kill_once(_) -> None:
            if len(driver.records) == 8 and not killed:
                killed.append(daemons.kill(rank))

        def recover(died: WorkerDied):
            noticed.append((time.monotonic(), died))
            daemons.restart(rank)
            return group.replace(died.rank)

        scheduler = Scheduler(scheduler_limits(group, loaded))
        driver = Driver(group, scheduler, kill_once, recover=recover)
        for request in cases.requests:
            driver.add_request(request)
        outputs = {output.req_id: output.token_ids for output in driver.run()}
        after = group.get_status()
        again = generate(group, loaded, cases.requests)
    assert outputs == again.tokens == cases.expected
    (at, died), = noticed
    assert died.rank == rank and daemons.endpoints[rank] in str(died)
    detection(3, f"kill -9 of rank {rank} in a step, pp={pp} tp={tp}", 0.1, at - killed[0], died.detail)
    assert after[rank].pid == daemons.processes[rank].pid
    assert after[1 - rank].worker_uid == before.worker_uid

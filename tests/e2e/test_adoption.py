"""Drivers that are killed in the middle of serving: the next one goes on with their requests, and
every token is that of a run that nobody disturbed."""

import json
import random

import pytest

from client.launcher import LocalDaemons
from client.worker_group import WorkerGroup
from tests.support.checkpoints import prompts
from tests.support.doomed_driver import NUM_GPU_BLOCKS, Death
from tests.support.killed_driver import DriverNursery, Plan, serve
from tests.support.serving import connect, worker_config

STEP_DEADLINE_MS = 300
"""gloo ends a wait for a peer that never comes a second after this."""


@pytest.fixture(scope="module")
def two_daemons(model_root):
    """Daemons that no other module uses."""
    with LocalDaemons(["cpu", "cpu"], model_root) as daemons:
        yield daemons


@pytest.fixture(scope="module")
def nursery():
    nursery = DriverNursery()
    yield nursery
    nursery.close()


def random_lines(seed: int, count: int, max_tokens: int = 24) -> list[str]:
    """Greedy and sampled requests, half of which begin alike."""
    rng = random.Random(seed)
    shared = prompts(seed, [13])[0].tolist()
    lines = []
    for index, tail in enumerate(prompts(seed + 1, [rng.randint(1, 40) for _ in range(count)])):
        prompt = (shared if index % 2 else []) + tail.tolist()
        line = {
            "id": f"r{index}",
            "prompt_token_ids": prompt,
            "max_tokens": rng.randint(8, max_tokens),
        }
        if index % 3 == 1:
            line |= {"temperature": 1.1, "top_p": 0.9, "seed": rng.randrange(1 << 40)}
        lines.append(json.dumps(line))
    return lines


def finish(group, loaded, plan):
    driver, _, done = serve(group, loaded, plan)
    outputs = {output.req_id: output for output in [*done, *driver.run()]}
    return {name: output.token_ids for name, output in outputs.items()}


@pytest.fixture(scope="module")
def undisturbed(two_daemons, checkpoint):
    """undisturbed(plan) -> tokens of its lines."""

    def run(plan):
        with connect(plan.endpoints, plan.config, reload=True) as (group, loaded):
            return finish(group, loaded, plan)

    return run


def take_over(plan):
    with WorkerGroup(plan.endpoints, plan.config.parallel) as group:
        group.attach(keep_requests=True)
        loaded = group.prepare(plan.config, num_gpu_blocks=NUM_GPU_BLOCKS)
        assert loaded.was_loaded
        adopted = group.adopt_requests()
        return adopted, finish(group, loaded, plan)


@pytest.mark.parametrize(("pp", "tp"), [(1, 1), (2, 1), (1, 2)])
def test_try(two_daemons, checkpoint, nursery, undisturbed, pp, tp):
    import time

    config = worker_config(
        checkpoint().path, pp, tp, step_deadline_ms=STEP_DEADLINE_MS, max_num_batched_tokens=64
    )
    base = Plan(two_daemons.endpoints[: pp * tp], config, random_lines(3, 8), adopt=True)
    expected = undisturbed(base)
    for step in (1, 3, 7, 12, 15):
        t = time.time()
        import msgspec

        nursery.live(
            msgspec.structs.replace(
                base, adopt=False, death=Death(step, [random.randrange(pp * tp)], bool(step % 2))
            )
        )
        t1 = time.time()
        adopted, tokens = take_over(base)
        print(
            step,
            round(t1 - t, 2),
            round(time.time() - t1, 2),
            [
                (a.req_id, len(a.token_ids), a.num_computed_tokens, len(a.block_ids))
                for a in adopted
            ],
        )
        assert tokens == expected

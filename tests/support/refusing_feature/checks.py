"""Checks with drivers of the copy: requests with and without the refusing feature run out of blocks
and lose their driver, and every token must equal transformers'."""

import random
from collections.abc import Sequence
from typing import NamedTuple

import msgspec

from tests.support.checkpoints import Checkpoint, NearTie, prompts
from tests.support.forked_drivers import ForkedDrivers
from tests.support.refusing_feature.plans import Outcome, Plan, Wanted
from tests.support.serving import SHARED_GPU, worker_config


class Load(NamedTuple):
    """The requests for a group."""

    num_requests: int = 6
    prompt_lens: tuple[int, int] = (5, 13)
    """Lower and upper bound."""
    max_tokens: tuple[int, int] = (14, 18)
    """Lower and upper bound."""
    max_model_len: int = 40
    max_num_batched_tokens: int = 32
    num_blocks: int = 15
    """Blocks of four tokens: too few for all requests at once."""
    dies_after: int = 12
    """See Plan, like the next field."""
    defers: bool = False


SHORT = Load()


def check_serving(
    drivers: ForkedDrivers,
    endpoints: Sequence[str],
    checkpoint: Checkpoint,
    load: Load = SHORT,
    layer_partition: tuple[int, ...] | None = None,
) -> Outcome:
    """Run on a pipeline of all the daemons, once to the end and once with a dying driver. Return
    the first run's outcome."""
    seed = random.randrange(1 << 30)
    wanted, expected = refusing_requests(checkpoint, random.Random(seed), load)
    config = worker_config(
        checkpoint.path,
        len(endpoints),
        layer_partition=layer_partition,
        max_num_seqs=16,
        max_num_batched_tokens=load.max_num_batched_tokens,
        max_model_len=load.max_model_len,
        gpu_memory_utilization=SHARED_GPU,
    )
    plan = Plan(
        list(endpoints),
        config,
        wanted,
        load.num_blocks,
        adopt=False,
        dies_after=None,
        defers=load.defers,
    )
    whole = live(drivers, plan)
    assert whole is not None and whole.tokens == expected, seed
    assert whole.num_preemptions > 0, seed
    assert whole.num_refused > 10, seed
    live(drivers, msgspec.structs.replace(plan, dies_after=load.dies_after), code=9)
    rest = live(drivers, msgspec.structs.replace(plan, adopt=True))
    assert rest is not None and rest.num_adopted > 0, seed
    # If a window freed a block because of a token that was then refused, the row has no KV.
    assert rest.num_warm > 0 or rest.num_groups > 1, seed
    assert rest.tokens == expected, seed
    return whole


def live(drivers: ForkedDrivers, plan: Plan, code: int = 0) -> Outcome | None:
    """Run a driver of the copy; return its output if it exits with the expected code."""
    outcome, exited = drivers.live(msgspec.json.encode(plan))
    assert exited == code, "its error is on stderr"
    return msgspec.json.decode(outcome, type=Outcome) if code == 0 else None


def refusing_requests(
    checkpoint: Checkpoint, rng: random.Random, load: Load
) -> tuple[list[Wanted], dict[str, list[int]]]:
    """Return requests with their expected tokens; a third of them refuses nothing."""
    wanted: list[Wanted] = []
    expected: dict[str, list[int]] = {}
    lengths = [_cycle(load.prompt_lens, index) for index in range(60)]
    for index, prompt in enumerate(prompts(rng.randrange(1 << 20), lengths)):
        name, length = f"r{index}", _cycle(load.max_tokens, index)
        try:
            expected[name] = checkpoint.greedy(prompt.tolist(), length)
        except NearTie:
            continue
        wanted.append(Wanted(name, prompt.tolist(), length, (60, 0, 25)[len(wanted) % 3]))
        if len(wanted) == load.num_requests:
            return wanted, expected
    raise AssertionError("too few prompts have a clear continuation")


def _cycle(bounds: tuple[int, int], index: int) -> int:
    first, last = bounds
    return first + index % (last - first + 1)

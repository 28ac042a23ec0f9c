"""Groups whose experts move, requests whose tokens no move may change, and moves beside their
steps."""

import random
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

import numpy as np
from msgspec.structs import replace

from rpc_schema.config import WorkerConfig
from tests.support.checkpoints import Checkpoint, decisive_prompts
from tests.support.expert_counts import NearTie, expected_loads
from tests.support.serving import greedy_request
from tests.support.serving import worker_config as config_of
from worker_client.group.experts import Rebalance
from worker_client.replicas.lockstep import LockstepScheduler
from worker_client.requests import GenerationRequest
from worker_client.scheduler import Scheduler, SchedulerLimits
from worker_client.worker_group import WorkerGroup

ARCHITECTURE = "Qwen2MoeForCausalLM"
FIELDS = {"num_experts": 7, "num_hidden_layers": 3, "mlp_only_layers": [1]}
LAYERS = [0, 2]
NUM_BLOCKS = 128
TOKENS = 12
LENGTHS = [9, 17, 4, 1, 23, 6]

Case = tuple[list[GenerationRequest], dict[str, list[int]]]
"""Requests, and their tokens."""


def clear_case(model: Checkpoint, seed: int) -> Case:
    """Return requests whose tokens' experts no rounding can change."""
    for drawn in range(seed, seed + 50):
        prompts = decisive_prompts(model, drawn, LENGTHS, TOKENS)
        tokens = [model.greedy(own, TOKENS) for own in prompts]
        computed = [[*own.tolist(), *more][:-1] for own, more in zip(prompts, tokens, strict=True)]
        try:
            expected_loads(model.model, computed)
        except NearTie:
            continue
        names = [f"r{index}" for index in range(len(prompts))]
        requests = [
            greedy_request(name, own, TOKENS) for name, own in zip(names, prompts, strict=True)
        ]
        return requests, dict(zip(names, tokens, strict=True))
    raise AssertionError("no prompts are clear")


def worker_config(
    path: Path, dp: int, pp: int, tp: int, redundant: int | None = None, **options: object
) -> WorkerConfig:
    """Return the configuration of a group whose experts can move. redundant: None for as few as
    fill all slots."""
    config = config_of(path, pp, tp, enable_expert_parallel=True, **options)
    parallel = replace(config.parallel, data_parallel_size=dp, data_parallel_lockstep=dp > 1)
    extra = -FIELDS["num_experts"] % (dp * tp) if redundant is None else redundant
    model = replace(config.model, enable_eplb=True, num_redundant_experts=extra)
    return replace(config, parallel=parallel, model=model)


def new_scheduler(dp: int, limits: SchedulerLimits) -> Scheduler | LockstepScheduler:
    """Return a scheduler of all replicas."""
    own = [Scheduler(limits) for _ in range(dp)]
    return own[0] if dp == 1 else LockstepScheduler(own)


def begin_rebalance(group: WorkerGroup, chance: random.Random, **options: float) -> Rebalance:
    """Plan moves of all layers, by loads that make them worth it."""
    for _ in range(200):
        begun = group.experts.begin_rebalance(_drawn_loads(chance), **options)
        if len(begun.planned) == len(LAYERS):
            return begun
    raise AssertionError("no loads are worth a move")


def _drawn_loads(chance: random.Random) -> Mapping[int, np.ndarray]:
    """Return loads that move most experts somewhere else."""
    draw = np.random.default_rng(chance.randrange(1 << 30)).pareto
    shape = FIELDS["num_experts"]
    return {layer: (draw(1.0, shape) * 1000).astype(np.int64) + 1 for layer in LAYERS}


def finish(begun: Rebalance, step: Callable[[], object] = lambda: time.sleep(0.001)) -> int:
    """Move and switch what is left, with a step at least between both. Return the number of moved
    slots."""
    while not begun.is_done:
        begun.advance()
        if begun.is_moving:
            step()
    return begun.report.num_moved


def rebalance(group: WorkerGroup, chance: random.Random) -> int:
    """Move some experts of all layers. Return their number."""
    return finish(begin_rebalance(group, chance))


def placements(group: WorkerGroup) -> dict[int, set[bytes]]:
    """Return the placements that the ranks have now, by layer: one if they agree."""
    found: dict[int, set[bytes]] = {}
    for status in group.get_status():
        for entry in status.expert_placements:
            found.setdefault(entry.layer, set()).add(entry.experts)
    return found


def links(group: WorkerGroup) -> Sequence[int]:
    """Return the link of each rank."""
    return [status.link for status in group.get_status()]

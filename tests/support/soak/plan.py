"""The plan of a soak, from one seed: requests with their arrivals, and faults. Pure: starts nothing
and reads no clock."""

import random
from typing import Literal, TypeAlias

import msgspec
import numpy as np

from tests.support.flat_requests import flat_request
from worker_client.requests import GenerationRequest

POISON = 7
"""Token whose embedding in the checkpoint is NaN."""

MAX_PROMPT = 60
MAX_TOKENS = 100
FIRST_TOKEN_ID = 8
"""Lowest token of ordinary prompts: above POISON."""

FaultKind: TypeAlias = Literal[
    "kill_rank",
    "kill_all_ranks",
    "die_in_step",
    "stop_rank_briefly",
    "stop_rank_beyond_fence",
    "raise_in_step",
    "hang_in_step",
    "lose_device",
    "kill_driver",
    "driver_leaves",
    "stop_driver_briefly",
    "stop_driver_beyond_lease",
    "replace_stopped_driver",
    "hold_driver",
    "sleep_and_wake",
    "strange_frames",
    "second_driver",
]

WEIGHTS: dict[FaultKind, int] = {
    "kill_rank": 3,
    "kill_all_ranks": 1,
    "die_in_step": 2,
    "stop_rank_briefly": 2,
    "stop_rank_beyond_fence": 2,
    "raise_in_step": 3,
    "hang_in_step": 2,
    "lose_device": 1,
    "kill_driver": 4,
    "driver_leaves": 1,
    "stop_driver_briefly": 1,
    "stop_driver_beyond_lease": 2,
    "replace_stopped_driver": 2,
    "hold_driver": 2,
    "sleep_and_wake": 2,
    "strange_frames": 2,
    "second_driver": 1,
}


class Fault(msgspec.Struct, frozen=True):
    """A fault to inject."""

    at_s: float
    """Seconds since the start."""
    kind: FaultKind
    rank: int
    """Rank, if the kind has one."""
    seconds: float
    """Duration, if it has one."""
    calls_before: int
    """Calls of the worker's function before it strikes in a step."""
    where: Literal["forward", "argmax_tokens", "execute_model"]
    times: int


def is_lasting(fault: Fault) -> bool:
    """Return True if it also strikes the recovery, warm-up included: a driver may then give up
    after its documented number of attempts, and the next one must continue."""
    in_step = ("raise_in_step", "hang_in_step", "lose_device", "die_in_step")
    return fault.times > 1 and fault.kind in in_step


class PlannedRequest(msgspec.Struct, frozen=True):
    """A request and its arrival."""

    req_id: str
    at_s: float
    prompt: list[int]
    max_tokens: int
    cancel_after_s: float | None
    sampling: dict[str, float | int]

    def to_request(self) -> GenerationRequest:
        return flat_request(
            id=self.req_id,
            prompt=np.array(self.prompt, np.int32),
            max_tokens=self.max_tokens,
            **self.sampling,
        )


SAMPLINGS: tuple[dict[str, float | int], ...] = (
    {},
    {},
    {"temperature": 0.8},
    {"temperature": 1.1, "top_p": 0.9},
    {"temperature": 1.0, "top_k": 12},
    {"temperature": 1.3, "min_p": 0.05, "logprobs": 2},
)


def plan_requests(seed: int, seconds: float, per_s: float, vocab_size: int) -> list[PlannedRequest]:
    """Return the requests of a run, in the order of their arrival: single ones, and bursts that
    often share a prefix; some contain POISON, some are cancelled."""
    source = random.Random(seed)
    requests: list[PlannedRequest] = []
    at_s = 0.0
    while at_s < seconds:
        burst = source.choice((1, 1, 2, 3, 8))
        stem = _tokens(source, vocab_size, source.choice((0, 0, 9, 22)))
        requests += [
            plan_request(source, f"r{len(requests) + index}", at_s, stem, vocab_size)
            for index in range(burst)
        ]
        at_s += source.expovariate(per_s / burst)
    return requests


def plan_request(
    source: random.Random, req_id: str, at_s: float, stem: list[int], vocab_size: int
) -> PlannedRequest:
    """Return a random request, whose prompt begins with a stem."""
    prompt = stem + _tokens(source, vocab_size, source.randint(1, MAX_PROMPT - len(stem)))
    if source.random() < 0.04:
        prompt[source.randrange(len(stem), len(prompt))] = POISON
    sampling = source.choice(SAMPLINGS)
    if sampling:
        sampling = {**sampling, "seed": source.randrange(1 << 60)}
    return PlannedRequest(
        req_id=req_id,
        at_s=round(at_s, 3),
        prompt=prompt,
        max_tokens=source.randint(1, MAX_TOKENS),
        cancel_after_s=round(source.expovariate(2.0), 3) if source.random() < 0.06 else None,
        sampling=sampling,
    )


def _tokens(source: random.Random, vocab_size: int, count: int) -> list[int]:
    return [source.randrange(FIRST_TOKEN_ID, vocab_size) for _ in range(count)]


def plan_faults(seed: int, seconds: float, every_s: float, num_ranks: int) -> list[Fault]:
    """Return the faults of a run, one every so often, each kind once before they repeat."""
    source = random.Random(seed + 1)
    deck: list[FaultKind] = []
    faults = []
    for index in range(int(seconds / every_s)):
        if not deck:
            deck = _deck(source)
        kind = deck.pop()
        faults.append(
            Fault(
                at_s=round(every_s * index + every_s * source.uniform(0.2, 0.8), 3),
                kind=kind,
                rank=source.randrange(num_ranks),
                seconds=round(_duration(source, kind), 3),
                calls_before=source.randrange(40),
                where=source.choice(("forward", "argmax_tokens", "execute_model")),
                times=source.choice((1, 1, 2)),
            )
        )
    return faults


def _deck(source: random.Random) -> list[FaultKind]:
    """Return all kinds as often as their weights, each once at the top."""
    once = list(WEIGHTS)
    again = [kind for kind, weight in WEIGHTS.items() for _ in range(weight - 1)]
    source.shuffle(once)
    source.shuffle(again)
    return again + once


_DURATIONS: dict[str, tuple[float, float]] = {
    "stop_rank_briefly": (0.2, 3.0),
    "stop_rank_beyond_fence": (5.5, 8.0),
    "stop_driver_briefly": (0.2, 0.9),
    "stop_driver_beyond_lease": (3.0, 7.0),
    "replace_stopped_driver": (3.0, 7.0),
    "hold_driver": (0.5, 20.0),
    "hang_in_step": (2.5, 6.0),
}
"""Bounds in seconds, for kinds that others do not suit."""


def _duration(source: random.Random, kind: FaultKind) -> float:
    return source.uniform(*_DURATIONS.get(kind, (0.1, 1.5)))

"""Random valid steps over a plain dict of requests: what the row tests compare RequestState and
InputBuilder with. Knows nothing of how either keeps its rows.
"""

from dataclasses import dataclass, field

import numpy as np
import torch

from rpc_schema.step import ExecuteModel, NewRequestData
from worker_client.requests import SamplingParams
from worker_daemon.runner.parts.registry import make_parts
from worker_daemon.runner.request_state import RequestState
from worker_daemon.sample.sampler import TorchSampling


def request_state(limits, replicas=None):
    """Empty rows, and the parts that validate requests against them. replicas: those in lockstep,
    as a rank knows them."""
    parts = make_parts(limits, torch.device("cpu"), TorchSampling())
    return RequestState(limits, parts, replicas)


@dataclass
class Request:
    """A request as the driver sees it."""

    known: list[int]
    num_prompt: int
    computed: int
    sampling: SamplingParams
    sampled: list[int] = field(default_factory=list)
    num_tokens: int = 0
    blocks: list[int] = field(default_factory=list)


@dataclass
class Admission:
    slot: int
    tokens: list[int]
    num_prompt: int
    computed: int
    sampling: SamplingParams


@dataclass
class Plan:
    """One step in plain Python."""

    finished: list[int] = field(default_factory=list)
    keep: list[int] | None = None
    admissions: list[Admission] = field(default_factory=list)
    blocks: list[tuple[int, int]] = field(default_factory=list)
    scheduled: dict[int, int] = field(default_factory=dict)
    sampling: list[int] = field(default_factory=list)
    """Scheduled requests that reach their last token."""
    deferred: list[int] = field(default_factory=list)
    """Scheduled requests whose sampling is deferred."""
    several: dict[int, int] = field(default_factory=dict)
    """Number of samples of requests that sample more than one token."""


class NaiveRows:
    """Requests by slot, stepped one at a time."""

    def __init__(self, limits):
        self.limits = limits
        self.requests = {}
        self.unsampled = {}
        self.held = {}
        self.admissions = [0] * limits.max_num_seqs

    def apply(self, seq, plan):
        """Returns {slot: (start, count, number of samples)} of the step."""
        for slot in plan.finished:
            del self.requests[slot]
            for slots in self.unsampled.values():
                slots.discard(slot)
        if plan.keep is not None:
            self.requests = {s: r for s, r in self.requests.items() if s in plan.keep}
            self.unsampled = {}
        for new in plan.admissions:
            self.requests[new.slot] = Request(
                new.tokens, new.num_prompt, new.computed, new.sampling, [], len(new.tokens)
            )
            self.admissions[new.slot] += 1
        for slot, block_id in plan.blocks:
            self.requests[slot].blocks.append(block_id)
        ran = {}
        for slot in sorted(plan.scheduled):
            request, count = self.requests[slot], plan.scheduled[slot]
            start = request.computed
            request.computed += count
            samples = request.computed == request.num_tokens
            request.num_tokens += samples
            ran[slot] = (start, count, plan.several.get(slot, 1) if samples else 0)
        if plan.deferred:
            assert all(ran[slot][2] > 0 for slot in plan.deferred)
            self.unsampled[seq] = {*plan.deferred}
            self.held[seq] = len(plan.deferred)
        return ran

    @property
    def num_held(self):
        """Rows whose logits are kept: those of requests that have ended too."""
        return sum(self.held[seq] for seq in self.unsampled)

    @property
    def waiting(self):
        """Slots whose newest token is not sampled yet."""
        return set().union(*self.unsampled.values())

    def resync_rows(self, slots):
        return [
            (
                s,
                self.requests[s].computed,
                self.requests[s].num_tokens,
                len(self.requests[s].blocks),
            )
            for s in sorted(slots)
        ]


class StepGenerator:
    """Draws valid plans: admissions, chunks, decodes, finishes, resynchronisations."""

    def __init__(self, rng, limits):
        self.rng = rng
        self.limits = limits

    def draw(self, rows):
        rng, plan = self.rng, Plan()
        plan.finished = [s for s in rows.requests if rng.random() < 0.08]
        waiting = rows.waiting - {*plan.finished}
        live = {s: r for s, r in rows.requests.items() if s not in plan.finished}
        if rng.random() < 0.06:
            plan.keep = [s for s in live if s not in waiting and rng.random() < 0.8]
            live, waiting = {s: live[s] for s in plan.keep}, set()
        free = [s for s in range(self.limits.max_num_seqs) if s not in live]
        rng.shuffle(free)
        plan.admissions = [self.admission(s) for s in free[: int(rng.integers(0, 3))]]
        sizes = {s: (r.computed, r.num_tokens, len(r.blocks)) for s, r in live.items()}
        sizes |= {a.slot: (a.computed, len(a.tokens), 0) for a in plan.admissions}
        self._schedule(plan, {s: size for s, size in sizes.items() if s not in waiting})
        held = rows.num_held if plan.keep is None else 0
        fits = held + len(plan.sampling) <= self.limits.max_num_seqs
        if fits and len(rows.unsampled) < 8 and rng.random() < 0.15:
            share = rng.choice([0.4, 1])
            plan.deferred = [slot for slot in plan.sampling if rng.random() < share]
        return plan

    def admission(self, slot):
        rng, limits = self.rng, self.limits
        length = int(rng.integers(1, limits.max_model_len + 1))
        return Admission(
            slot,
            [int(t) for t in rng.integers(0, limits.vocab_size, length)],
            int(rng.integers(1, length + 1)),
            int(rng.integers(0, length)) if rng.random() < 0.4 else 0,
            self.sampling(),
        )

    def sampling(self):
        rng = self.rng
        random = rng.random() < 0.6
        return SamplingParams(
            temperature=float(rng.uniform(0.1, 2)) if random else 0.0,
            top_k=int(rng.integers(0, 9)),
            top_p=float(rng.uniform(0.05, 1)) if rng.random() < 0.5 else 1.0,
            min_p=float(rng.uniform(0, 0.5)) if rng.random() < 0.5 else 0.0,
            seed=int(rng.integers(0, 2**63 - 1, endpoint=True)),
            min_tokens=int(rng.integers(0, 4)),
            stop_token_ids=tuple(
                int(t) for t in rng.integers(0, self.limits.vocab_size, rng.integers(0, 3))
            ),
            logprobs=None
            if rng.random() < 0.5
            else int(rng.integers(0, min(6, self.limits.vocab_size + 1))),
        )

    def _schedule(self, plan, sizes):
        rng, limits, budget = self.rng, self.limits, self.limits.max_num_batched_tokens
        for slot, (computed, num_tokens, num_blocks) in sizes.items():
            room = min(num_tokens - computed, limits.max_model_len - computed, budget)
            if room < 1 or rng.random() < 0.15:
                continue
            count = room if rng.random() < 0.6 else int(rng.integers(1, room + 1))
            budget -= count
            needed = -(-(computed + count) // limits.block_size)
            spare = int(rng.integers(0, 2))
            total = min(max(needed, num_blocks + spare), limits.max_blocks_per_seq)
            plan.blocks += [
                (slot, int(rng.integers(1, limits.num_blocks))) for _ in range(total - num_blocks)
            ]
            plan.scheduled[slot] = count
            if computed + count == num_tokens:
                plan.sampling.append(slot)
                most = min(count, limits.max_samples_per_seq)
                if most > 1 and rng.random() < 0.6:
                    plan.several[slot] = int(rng.integers(1, most + 1))
        rng.shuffle(plan.blocks)
        plan.blocks = [(int(s), int(b)) for s, b in plan.blocks]


def int32s(*values):
    return np.array(values, "<i4").tobytes()


def uint16s(*values):
    return np.array(values, "<u2").tobytes()


def bitmap(slots):
    bits = bytearray(max(slots) // 8 + 1 if slots else 0)
    for slot in slots:
        bits[slot // 8] |= 1 << slot % 8
    return bytes(bits)


def encode(seq, plan, rows):
    """The plan as the driver sends it: (ExecuteModel, frames). rows: before the plan."""
    pairs = [v for s in sorted(plan.scheduled) if (n := plan.scheduled[s]) != 1 for v in (s, n)]
    resync = None
    if plan.keep is not None:
        resync = int32s(*(v for row in rows.resync_rows(plan.keep) for v in row))
    message = ExecuteModel(
        epoch=1,
        link=1,
        seq=seq,
        total_num_scheduled_tokens=sum(plan.scheduled.values()),
        scheduled=bitmap(plan.scheduled),
        num_scheduled_tokens=int32s(*pairs),
        new_block_slots=uint16s(*(slot for slot, _ in plan.blocks)),
        new_block_ids=int32s(*(block_id for _, block_id in plan.blocks)),
        finished=uint16s(*plan.finished),
        scheduled_new_reqs=tuple(
            NewRequestData(
                slot=new.slot,
                req_id=f"request-{seq}-{new.slot}",
                num_tokens=len(new.tokens),
                num_prompt_tokens=new.num_prompt,
                num_computed_tokens=new.computed,
                extensions=new.sampling.extensions(),
            )
            for new in plan.admissions
        ),
        resync=resync,
        deferred=bitmap(plan.deferred) if plan.deferred else None,
        num_samples=int32s(*(v for pair in sorted(plan.several.items()) for v in pair)),
    )
    tokens = [token for new in plan.admissions for token in new.tokens]
    return message, [int32s(*tokens)] if plan.admissions else []

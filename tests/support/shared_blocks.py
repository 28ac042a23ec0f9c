"""Attention over requests that share KV blocks, some of which are filled in the step that reads
them; on any device, with an fp64 reference."""

import random
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import torch

from benchmarks.paged_reference import Shape, relative_error
from tests.support.vllm_steps import PlannedSteps, new_request
from worker_daemon.contracts.attention import AttentionLayer, AttentionMetadata, AttentionStep
from worker_daemon.kernels.ops import TritonOps
from worker_daemon.kernels.paged_attention import TritonAttention

BOUND = 1e-2
"""Error that rounding may cause."""


class Rows(NamedTuple):
    """A request's part in a step."""

    num_computed: int
    count: int


@dataclass(frozen=True)
class Sharer:
    """A request's projected tokens and its blocks."""

    qkv: torch.Tensor  # [tokens, (Hq + 2 Hkv) D]
    blocks: Sequence[int]


class SharedLayer:
    """A layer's real backend and its cache, in which every slot is NaN at first: a slot that is
    read before it is written shows in the output. Positions do not rotate."""

    def __init__(self, shape: Shape, num_blocks: int, device: str, seed: int) -> None:
        self._shape, self._device = shape, torch.device(device)
        self._random = torch.Generator(device).manual_seed(seed)
        size = (num_blocks, 2, shape.block_size, shape.num_kv_heads, shape.head_dim)
        self._cache = torch.full(size, float("nan"), dtype=torch.float16, device=device)
        ops = TritonOps(self._device)
        self._layer = AttentionLayer(
            ops, shape.num_kv_heads, shape.head_dim, shape.scale, window=None, norms=None
        )
        self._backend = TritonAttention(self._device)
        self._sharers: dict[str, Sharer] = {}

    def add(
        self, req_id: str, num_tokens: int, blocks: Sequence[int], like: str = "", num_same: int = 0
    ) -> None:
        """Add a request with random tokens; the first num_same of them are those of `like`."""
        width = (self._shape.num_q_heads + 2 * self._shape.num_kv_heads) * self._shape.head_dim
        qkv = torch.randn(num_tokens, width, generator=self._random, device=self._device)
        qkv = qkv.half()
        if like:
            qkv[:num_same] = self._sharers[like].qkv[:num_same]
        self._sharers[req_id] = Sharer(qkv, blocks)

    def run(self, step: Mapping[str, Rows]) -> dict[str, torch.Tensor]:
        """Run a step; return each request's output [count, Hq, D]."""
        counts = [rows.count for rows in step.values()]
        lengths = [rows.num_computed + rows.count for rows in step.values()]
        positions = [np.arange(sum(rows) - rows.count, sum(rows)) for rows in step.values()]
        most = max(len(self._sharers[req_id].blocks) for req_id in step)
        table = np.zeros((len(step), most), np.int32)
        for row, req_id in enumerate(step):
            blocks = self._sharers[req_id].blocks
            table[row, : len(blocks)] = blocks
        size = self._shape.block_size
        slots = [table[row, p // size] * size + p % size for row, p in enumerate(positions)]
        metadata = AttentionMetadata(
            query_start_loc=self._ints(np.cumsum([0, *counts])),
            seq_lens=self._ints(lengths),
            seq_order=self._ints(np.argsort(-np.array(lengths), kind="stable")),
            block_table=self._ints(table),
            seq_rows=self._ints(np.arange(len(step))),
            slot_mapping=self._ints(np.concatenate(slots)),
            num_seqs=len(step),
            max_query_len=max(counts),
            max_seq_len=max(lengths),
            query_lens_np=np.array(counts, np.int32),
            seq_lens_np=np.array(lengths, np.int32),
        )
        angles = torch.zeros(max(lengths), 2, self._shape.head_dim // 2, device=self._device)
        angles[:, 0] = 1.0
        attention = AttentionStep(self._ints(np.concatenate(positions)), angles, metadata)
        qkv = [self._sharers[req_id].qkv[p] for req_id, p in zip(step, positions, strict=True)]
        out = self._backend.rotate_and_attend(torch.cat(qkv), self._cache, self._layer, attention)
        return dict(zip(step, out.split(counts), strict=True))

    def expected(self, req_id: str, rows: Rows) -> torch.Tensor:
        """Return a request's output [count, Hq, D] fp64, from its own tokens alone."""
        shape, end = self._shape, sum(rows)
        heads = self._sharers[req_id].qkv[:end].double().unflatten(1, (-1, shape.head_dim))
        kinds = (shape.num_q_heads, shape.num_kv_heads, shape.num_kv_heads)
        q, k, v = (part.transpose(0, 1) for part in heads.split(kinds, dim=1))
        out = torch.nn.functional.scaled_dot_product_attention(
            q, k, v, is_causal=True, scale=shape.scale, enable_gqa=True
        )
        return out.transpose(0, 1)[rows.num_computed :]

    def _ints(self, values: object) -> torch.Tensor:
        return torch.as_tensor(np.asarray(values, np.int32), device=self._device)


class Meeting:
    """A request `a` whose next tokens fill its last block, `b` that begins with a's full blocks,
    and others that decode. vLLM plans one step for all of them."""

    def __init__(
        self,
        shape: Shape,
        device: str,
        seed: int,
        num_others: int,
        filling: int = 1,
        reading: int = 1,
    ) -> None:
        """filling, reading: tokens of a and of b in the step."""
        rng, size = random.Random(seed), shape.block_size
        num_blocks = rng.randrange(1, 4)
        full = num_blocks * size
        blocks = [*range(1, num_blocks + 1)]
        self._block_size = size
        self.rows = {"a": Rows(full - filling, filling), "b": Rows(full, reading)}
        self._layer = SharedLayer(shape, 200, device, seed)
        self._layer.add("a", full + 5, blocks)
        self._layer.add("b", full + reading, [*blocks, num_blocks + 1], "a", full)
        before = {"a": Rows(0, full - filling)} if full > filling else {}
        for number in range(num_others):
            req_id, length = f"r{number}", rng.randrange(2, 4 * size)
            self.rows[req_id] = Rows(length - 1, 1)
            before[req_id] = Rows(0, length - 1)
            first = 10 + 4 * number
            self._layer.add(req_id, length, range(first, first + 4))
        if before:
            self._layer.run(before)

    @property
    def planned(self) -> list[set[str]]:
        """Return the requests of each step that the mapping makes of vLLM's."""
        steps, full = PlannedSteps(self._block_size, 2), self.rows["b"].num_computed
        (*_, last) = blocks = [*range(1, full // self._block_size + 1)]
        a, b = self.rows["a"], self.rows["b"]
        steps.write([new_request("a", full + 5, blocks)], {"a": a.num_computed})
        reader = new_request("b", sum(b), [*blocks, last + 1], full)
        counts = {"a": a.count, "b": b.count}
        return steps.write([reader], counts, (["a"], [a.num_computed], [None]))

    def errors(self, *steps: set[str]) -> dict[str, float]:
        """Return the error of each request after these steps."""
        found = {}
        for step in steps:
            outputs = self._layer.run({each: self.rows[each] for each in step})
            for req_id, out in outputs.items():
                expected = self._layer.expected(req_id, self.rows[req_id])
                found[req_id] = relative_error(out, expected)
        return found


def is_right(error: float) -> bool:
    """Return whether it is no more than rounding; NaN is not."""
    return error < BOUND


def check_planned_steps(meeting: Meeting) -> None:
    """Check that all outputs are right after the steps of vLLM's mapping."""
    filling, *reading = meeting.planned
    others = meeting.rows.keys() - {"a", "b"}
    errors = meeting.errors(filling | others, *reading)
    assert errors.keys() == meeting.rows.keys()
    assert all(map(is_right, errors.values())), errors


def check_other_steps(meeting: Meeting) -> None:
    """Check that all outputs are right after one step for all."""
    errors = meeting.errors({*meeting.rows})
    assert all(map(is_right, errors.values())), errors

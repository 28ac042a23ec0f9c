"""Computes the minimum time of a workload on a device: bytes and operations from the model's
config.json, divided by measured ceilings. Pure: measures nothing.

A step's GEMMs take the longer of reading the weights once and computing all rows. Its attention
reads every key and value of a decode once, and computes every visible pair of a prefill. The parts
of a step run in sequence, because each needs the previous one, and so do the steps: only an
implementation that overlaps one request's GEMMs with another's attention could be faster.
Activations, norms, sampling and launches count as zero.
"""

import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from worker_client.scheduler.planning import LEAST_CUT_DIVISOR

Request = tuple[int, int]
"""Tokens of the prompt, tokens to generate."""

MAX_NUM_SEQS = 256
MAX_NUM_BATCHED_TOKENS = 8192


@dataclass(frozen=True)
class Ceilings:
    """Measured limits of a device, in units per second; all_reduce_s is the time of a small
    all-reduce between two devices."""

    read_bytes: float
    matmul_flop: float
    attention_flop: float
    all_reduce_s: float = 0.0


@dataclass(frozen=True)
class ModelShape:
    """The sizes of a decoder with gated MLPs; weights and KV cache in 16 bits."""

    hidden_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    intermediate_size: int
    vocab_size: int

    @classmethod
    def read(cls, model: Path) -> "ModelShape":
        """Read the config.json of a model's directory."""
        config = json.loads((model / "config.json").read_text())
        num_heads = config["num_attention_heads"]
        return cls(
            hidden_size=config["hidden_size"],
            num_layers=config["num_hidden_layers"],
            num_heads=num_heads,
            num_kv_heads=config.get("num_key_value_heads", num_heads),
            head_dim=config.get("head_dim") or config["hidden_size"] // num_heads,
            intermediate_size=config["intermediate_size"],
            vocab_size=config["vocab_size"],
        )

    @property
    def layer_weights(self) -> int:
        """Values in the matrices of all layers."""
        q, kv = self.num_heads * self.head_dim, self.num_kv_heads * self.head_dim
        attention = self.hidden_size * (2 * q + 2 * kv)
        return self.num_layers * (attention + 3 * self.hidden_size * self.intermediate_size)

    @property
    def head_weights(self) -> int:
        """Values in the LM head."""
        return self.vocab_size * self.hidden_size

    @property
    def decode_weight_bytes(self) -> int:
        """Return the bytes of weights that a step with sampling reads."""
        return 2 * (self.layer_weights + self.head_weights)

    @property
    def kv_bytes_per_token(self) -> int:
        """Key and value of one token in all layers."""
        return 2 * 2 * self.num_layers * self.num_kv_heads * self.head_dim

    @property
    def flop_per_pair(self) -> int:
        """Operations for one visible query-key pair in all layers and heads."""
        return 4 * self.num_layers * self.num_heads * self.head_dim


@dataclass(frozen=True)
class StepWork:
    """The work of one step."""

    rows: int
    """Tokens that pass through the layers."""
    sampled: int
    """Rows that need logits."""
    decode_keys: int
    """Keys that decoding requests read, summed over the requests."""
    prefill_pairs: int
    """Visible pairs of query and key in prompts."""


def step_floor_s(shape: ModelShape, ceilings: Ceilings, work: StepWork, tp: int = 1) -> float:
    """Return the minimum seconds of a step on tp devices that each hold 1/tp of every matrix."""
    layers = _products_s(ceilings, shape.layer_weights, work.rows)
    head = _products_s(ceilings, shape.head_weights, work.sampled)
    keys = work.decode_keys * shape.kv_bytes_per_token / ceilings.read_bytes
    pairs = work.prefill_pairs * shape.flop_per_pair / ceilings.attention_flop
    reduces = 2 * shape.num_layers * ceilings.all_reduce_s if tp > 1 else 0.0
    return (layers + head + keys + pairs) / tp + reduces


def _products_s(ceilings: Ceilings, weights: int, rows: int) -> float:
    if not rows:
        return 0.0
    return max(2 * weights / ceilings.read_bytes, 2 * weights * rows / ceilings.matmul_flop)


def workload_floor_s(
    shape: ModelShape, ceilings: Ceilings, requests: Sequence[Request], pp: int = 1, tp: int = 1
) -> float:
    """Return the minimum seconds from the first submission to the last token, with all requests
    submitted at once.

    A pipeline of pp stages is fastest with the requests in pp groups that take turns: each group
    then takes as long as on one stage with the whole model, and none waits for another.
    """
    groups = [group for index in range(pp) if (group := requests[index::pp])]
    return max(
        sum(step_floor_s(shape, ceilings, work, tp) for work in schedule(group)) for group in groups
    )


@dataclass
class _Running:
    num_prompt: int
    num_out: int
    computed: int = 0
    generated: int = 0


def schedule(
    requests: Sequence[Request],
    max_num_seqs: int = MAX_NUM_SEQS,
    max_num_batched_tokens: int = MAX_NUM_BATCHED_TOKENS,
) -> Iterator[StepWork]:
    """Yield the steps of the reference scheduler: decodes first, then prompts in order within the
    token budget. If less than a part of it is left (LEAST_CUT_DIVISOR), a step with prompts begins
    none that it would have to cut."""
    waiting = [_Running(*request) for request in reversed(requests)]
    running: list[_Running] = []
    while waiting or running:
        decodes = [r for r in running if r.computed >= r.num_prompt]
        keys = sum(r.computed + 1 for r in decodes)
        for request in decodes:
            request.computed += 1
            request.generated += 1
        budget = max_num_batched_tokens - len(decodes)
        rows, sampled, pairs = len(decodes), len(decodes), 0
        prefilling = [r for r in running if r.computed < r.num_prompt]
        while budget and (prefilling or (waiting and len(running) < max_num_seqs)):
            if prefilling:
                request = prefilling.pop(0)
            else:
                is_little = budget * LEAST_CUT_DIVISOR < max_num_batched_tokens
                if rows > len(decodes) and is_little and waiting[-1].num_prompt > budget:
                    break
                request = waiting.pop()
                running.append(request)
            count = min(budget, request.num_prompt - request.computed)
            pairs += _visible_pairs(request.computed, count)
            request.computed += count
            budget -= count
            rows += count
            if request.computed == request.num_prompt:
                request.generated = 1
                sampled += 1
        running = [r for r in running if r.generated < r.num_out]
        yield StepWork(rows, sampled, keys, pairs)


def _visible_pairs(computed: int, count: int) -> int:
    """Return the visible pairs of count new tokens with themselves and all earlier tokens."""
    return count * computed + count * (count + 1) // 2

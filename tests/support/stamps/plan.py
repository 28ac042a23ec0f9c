"""The cases, and the plan of one, from a seed: requests, updates and deaths. Pure, and without
transformers, whose import takes a driver longer than all else."""

import random
from collections.abc import Mapping
from typing import Any, Literal, NamedTuple, TypeAlias

import msgspec
import numpy as np

from rpc_schema.structured import StructuredOutput
from tests.support.flat_requests import flat_request
from tests.support.structured import EOS_TOKEN_ID, VOCAB_SIZE
from worker_client.requests import GenerationRequest

NUM_MODELS = 5
MAX_PROMPT = 40
MAX_TOKENS = 40
MAX_MODEL_LEN = 96
NUM_STEMS = 3
"""Prompts often begin alike: with a prefix that some weights have cached."""
ADAPTER = "adapter"
NUM_CONTENTS = 3
"""Of the adapter."""
PATTERN = "[a-z ]{600}"
"""Longer than any output, with tokens of all classes at each place."""
SHORT_S = 0.03
"""Longest time from the beginning of an update to a death in it."""

Running: TypeAlias = Literal["keep", "drop", "recompute"]
Target: TypeAlias = Literal["model", "adapter"]
Way: TypeAlias = Literal["disk", "files", "gloo"]
Death: TypeAlias = Literal["", "driver", "driver in update", "rank", "rank in update", "trainer"]


class Case(NamedTuple):
    """A model, the shape of its group, and what its requests use."""

    architecture: str
    pp: int
    tp: int
    running: tuple[Running, ...]
    """What becomes of the requests that run, drawn for each update."""
    options: Mapping[str, Any] = {}
    """Of the checkpoint."""
    config: Mapping[str, Any] = {}
    """Fields of worker_config."""
    drafts: str = "none"
    lora: bool = False
    targets: tuple[Target, ...] = ("model",)
    """What is updated, drawn likewise."""
    grammars: bool = False
    budget: int | None = None
    """Tokens that are recomputed between two steps, of updates that recompute."""
    is_exact: bool = True
    """The reference computes the same."""


ANY: tuple[Running, ...] = ("keep", "drop", "recompute")

CASES: Mapping[str, Case] = {
    "pipeline": Case("LlamaForCausalLM", 2, 1, ("keep",), lora=True),
    "tensor": Case("Qwen3ForCausalLM", 1, 2, ("keep",), grammars=True),
    "experts": Case("Qwen3MoeForCausalLM", 1, 2, ANY, config={"enable_expert_parallel": True}),
    "windows": Case("MistralForCausalLM", 2, 1, ("keep",), options={"sliding_window": 10}),
    "drafts": Case("Qwen3ForCausalLM", 2, 1, ("drop",), drafts="ngram", grammars=True),
    "suffixes": Case("LlamaForCausalLM", 1, 2, ANY, drafts="suffix", lora=True, grammars=True),
    "fp8": Case(
        *("LlamaForCausalLM", 2, 1, ("keep", "recompute")),
        config={"kv_cache_dtype": "fp8"},
        is_exact=False,
    ),
    "recomputed": Case("Qwen3ForCausalLM", 2, 1, ("recompute",), lora=True, grammars=True),
    "budget": Case(
        *("LlamaForCausalLM", 2, 1, ("recompute",)), drafts="ngram", grammars=True, budget=20
    ),
    "recomputed windows": Case(
        *("MistralForCausalLM", 1, 2, ("recompute",)), options={"sliding_window": 10}
    ),
    "adapters": Case(
        *("Qwen3ForCausalLM", 2, 1, ANY), lora=True, targets=("model", "adapter", "adapter")
    ),
}


class Update(msgspec.Struct, frozen=True):
    """One update, and what dies with it the first time that it is tried."""

    way: Way
    target: Target
    running: Running
    num_steps: int
    """Before it."""
    death: Death
    delay_s: float
    rank: int


def plan_updates(seed: int, count: int, case: Case, deaths: Mapping[Death, int]) -> list[Update]:
    """Return the updates of a run. deaths: how many of each kind."""
    rng = random.Random(seed)
    dying = [death for death, number in deaths.items() for _ in range(number)]
    dying += [""] * (count - len(dying))
    rng.shuffle(dying)
    return [_plan_update(rng, case, death) for death in dying]


def _plan_update(rng: random.Random, case: Case, death: Death) -> Update:
    target, running = rng.choice(case.targets), rng.choice(case.running)
    ways: list[Way] = ["disk", "disk", "gloo"]
    if target == "model" and (running == "recompute" or not case.config.get("kv_cache_dtype")):
        ways.append("files")  # they have the scales of an FP8 cache too, which none may keep
    return Update(
        "gloo" if death == "trainer" else rng.choice(ways),
        target,
        running,
        rng.randrange(1, 9),
        death,
        rng.uniform(0.0, SHORT_S),
        rng.randrange(case.pp * case.tp),
    )


def plan_request(seed: int, number: int, case: Case) -> GenerationRequest:
    """Return request `number` of a run."""
    rng, stems = random.Random(f"{seed}/{number}"), random.Random(seed)
    stem = rng.choice([_tokens(stems, 17) for _ in range(NUM_STEMS)]) if rng.random() < 0.5 else []
    prompt = stem + _tokens(rng, rng.randint(1, MAX_PROMPT - len(stem)))
    fields: dict[str, Any] = {"ignore_eos": True}
    if rng.random() < 0.4:
        fields |= {"temperature": 1.0, "top_k": 3, "seed": rng.randrange(1 << 60)}
    if case.lora and rng.random() < 0.4:
        fields["lora"] = ADAPTER
    if case.grammars and rng.random() < 0.4:
        fields["structured_outputs"] = StructuredOutput(kind="regex", text=PATTERN)
    return flat_request(
        id=f"r{number}",
        prompt=np.array(prompt, np.int32),
        max_tokens=rng.randint(4, MAX_TOKENS),
        **fields,
    )


def _tokens(rng: random.Random, count: int) -> list[int]:
    return [rng.randrange(EOS_TOKEN_ID + 1, VOCAB_SIZE) for _ in range(count)]


def model_of(version: int) -> int:
    """Return the model that an update to this version brings."""
    return version % NUM_MODELS


def content_of(adapter_version: int) -> int:
    """Return the contents of the adapter that an update of it to this version brings. Version 0 is
    that of its files."""
    return adapter_version % NUM_CONTENTS


def next_version(known: int, rng: random.Random) -> int:
    """Return a version that is larger than one, of a random model."""
    return known + rng.randrange(1, NUM_MODELS + 1)


def name_of(content: int) -> str:
    """Return the directory of the adapter with such contents, below the one of all adapters."""
    return f"{ADAPTER}-{content}" if content else ADAPTER

"""The cases, and the plan of one, from a seed: requests, updates and deaths. Pure."""

import random
from collections.abc import Mapping
from typing import Any, Literal, NamedTuple, TypeAlias

import msgspec
import numpy as np

from rpc_schema.structured import StructuredOutput
from tests.support.flat_requests import flat_request
from tests.support.stamps.models import NUM_MODELS
from tests.support.structured import EOS_TOKEN_ID, VOCAB_SIZE
from worker_client.requests import GenerationRequest

MAX_PROMPT = 40
MAX_TOKENS = 40
MAX_MODEL_LEN = 96
NUM_STEMS = 3
"""Prompts often begin alike: with a prefix that some weights have cached."""
ADAPTER = "adapter"
PATTERN = "[a-z ]{600}"
"""Longer than any output, with tokens of all classes at each place."""
SHORT_S = 0.03
"""Longest time from the beginning of an update to a death in it."""

Running: TypeAlias = Literal["keep", "drop"]
Way: TypeAlias = Literal["disk", "files", "gloo"]
Death: TypeAlias = Literal["", "driver", "driver in update", "rank", "rank in update", "trainer"]


class Case(NamedTuple):
    """A model, the shape of its group, and what its requests use."""

    architecture: str
    pp: int
    tp: int
    running: Running
    options: Mapping[str, Any] = {}
    """Of the checkpoint."""
    config: Mapping[str, Any] = {}
    """Fields of worker_config."""
    drafts: str = "none"
    lora: bool = False
    grammars: bool = False
    is_exact: bool = True
    """The reference computes the same."""


CASES: Mapping[str, Case] = {
    "pipeline": Case("LlamaForCausalLM", 2, 1, "keep", lora=True),
    "tensor": Case("Qwen3ForCausalLM", 1, 2, "keep", grammars=True),
    "experts": Case(
        "Qwen3MoeForCausalLM", 1, 2, "drop", config={"enable_expert_parallel": True}, lora=False
    ),
    "windows": Case("MistralForCausalLM", 2, 1, "keep", options={"sliding_window": 10}),
    "drafts": Case("Qwen3ForCausalLM", 2, 1, "drop", drafts="ngram", grammars=True),
    "suffixes": Case("LlamaForCausalLM", 1, 2, "keep", drafts="suffix", lora=True, grammars=True),
    "fp8": Case(
        *("LlamaForCausalLM", 2, 1, "keep"), config={"kv_cache_dtype": "fp8"}, is_exact=False
    ),
    "adapters": Case("Qwen3ForCausalLM", 1, 1, "drop", lora=True, grammars=True),
}


class Update(msgspec.Struct, frozen=True):
    """One update, and what dies with it the first time that it is tried."""

    way: Way
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
    ways: list[Way] = ["disk", "disk", "gloo", "files"]
    if case.config.get("kv_cache_dtype"):
        ways.remove("files")  # files have scales too, so that such a reload keeps no request
    return [
        Update(
            "gloo" if death == "trainer" else rng.choice(ways),
            rng.randrange(1, 9),
            death,
            rng.uniform(0.0, SHORT_S),
            rng.randrange(case.pp * case.tp),
        )
        for death in dying
    ]


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


def next_version(known: int, rng: random.Random) -> int:
    """Return a version that is larger than one, of a random model."""
    return known + rng.randrange(1, NUM_MODELS + 1)

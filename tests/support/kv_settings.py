"""Settings of the fuzzer of KV blocks (fuzz_kv.py): which model, drafts, cache and adapters, in
which shape, and where blocks go. The reference that goes with each."""

import contextlib
import random
import shutil
import threading
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from pathlib import Path
from typing import NamedTuple

import numpy as np

from rpc_schema.config import LoraConfig, WorkerConfig
from rpc_schema.kv_cache import request_blocks
from tests.support.checkpoints import LEAST_MARGIN, Checkpoint, make_checkpoint
from tests.support.forked_daemons import ForkedDaemons
from tests.support.rounded_caches import TOLERANCE, with_fp8_cache
from tests.support.serving import connect, drafts_by, greedy_request, worker_config
from tests.support.tiered_waves import new_driver
from tests.support.window_models import MODELS, WINDOW
from worker_client.driver import Driver

CONNECTORS = ("tier", "kept tier", "files", "peers", "peers", "kept tier", "files", "peers")
"""By the number of a setting, in turn."""
SHAPES = ((1, 1), (1, 1), (1, 2), (2, 1))
"""(pp, tp)."""
MODEL_KINDS: Mapping[str, Mapping[str, object]] = {
    "full": {},
    "windows": {**MODELS["mixed"], "sliding_window": WINDOW},
    "all slide": {**MODELS["mistral"], "sliding_window": WINDOW},
    "upper slide": {**MODELS["upper"], "sliding_window": WINDOW},
}
"""Fields of checkpoints. Those that slide have windows of 10 tokens, and several KV groups."""
DRAFTS = ("none", "none", "none", "ngram", "suffix", "draft_model", "wrong draft_model")
WEIGHTS = ("a", "b")
CONTENTS = (1, 2)
"""Contents that an adapter can have."""
ADAPTER = "policy"
MAX_MODEL_LEN = 64
HOST_BYTES = (1 << 17, 1 << 20)
"""A tier that evicts, and one that hardly does."""
LORA = LoraConfig(max_loras=2, max_lora_rank=8, max_cpu_loras=4)


@dataclass
class Model:
    """Checkpoints of one form with other weights, and adapters for them. Each is made when it is
    first needed."""

    kind: str
    is_fp8: bool
    """Checkpoints have scales of a cache in FP8."""
    directory: Path
    """The daemons' root."""
    _made: dict[str, Checkpoint] = field(default_factory=dict)
    _lock: threading.Lock = field(default_factory=threading.Lock)
    """Held while a checkpoint is made: torch has one source of random numbers."""

    @property
    def name(self) -> str:
        return f"{self.kind.replace(' ', '-')}{'-fp8' * self.is_fp8}"

    def path(self, weights: str) -> Path:
        """Directory of the checkpoint with one of WEIGHTS."""
        return self._checkpoint(weights).path

    @property
    def adapter_name(self) -> str:
        """Name of the adapter that changes."""
        return f"{self.name}-{ADAPTER}"

    def put_adapter(self, content: int) -> None:
        """Let its files have a content from now on."""
        made = self.directory / self.adapters[content]
        shutil.copytree(made, self.directory / self.adapter_name, dirs_exist_ok=True)

    @cached_property
    def adapters(self) -> Mapping[int, str]:
        """Names of adapters that do not change, by content."""
        from tests.support.lora_adapters import make_adapter  # PEFT takes seconds of CPU time

        made = {}
        for content in CONTENTS:
            name = f"{self.name}-{content}"
            path = make_adapter(self._checkpoint("a"), name, seed=content, rank=4).path
            path.rename(self.directory / name)
            made[content] = name
        return made

    def _checkpoint(self, weights: str) -> Checkpoint:
        with self._lock:
            if weights not in self._made:
                own, seed = self.directory / self.name, 21 + WEIGHTS.index(weights)
                made = make_checkpoint(own, seed=seed, **MODEL_KINDS[self.kind])
                if self.is_fp8:
                    made = with_fp8_cache(made, "heads", 21)  # the same: updates keep scales
                self._made[weights] = made
            return self._made[weights]


@dataclass(frozen=True)
class Setting:
    """What stays the same for some cases."""

    connector: str
    shapes: tuple[tuple[int, int], ...]
    """(pp, tp) of the group or, of peers, of that which computes prompts and of the other."""
    is_kept: bool
    """The prompts' group has a tier that outlives its daemons."""
    model: str
    drafts: str
    is_fp8: bool
    has_adapter: bool
    max_step_tokens: int
    host_bytes: int

    @classmethod
    def of(cls, number: int, connectors: Sequence[str] = CONNECTORS) -> "Setting":
        """The setting of a number."""
        rng = random.Random(number)
        connector = connectors[number % len(connectors)]
        return cls(
            connector,
            tuple(rng.choice(SHAPES) for _ in range(2 if connector == "peers" else 1)),
            connector == "kept tier" or (connector == "peers" and bool(rng.randrange(2))),
            rng.choice(("full", *MODEL_KINDS)),
            rng.choice(DRAFTS),
            not rng.randrange(4),
            not rng.randrange(3),
            rng.choice((8, 16, 32)),
            rng.choice(HOST_BYTES),
        )

    def with_connector(self, connector: str) -> "Setting":
        """The same with another connector, of ranks that have all layers."""
        shapes = ((1, 1),) * (2 if connector == "peers" else 1)
        is_kept = connector == "kept tier" or (connector == "peers" and self.is_kept)
        return replace(self, connector=connector, shapes=shapes, is_kept=is_kept)

    @property
    def kinds(self) -> list[str]:
        """What it is, for counts."""
        found = [self.model, f"drafts: {self.drafts}", f"chunks of {self.max_step_tokens}"]
        found += ["FP8 cache"] * self.is_fp8 + ["adapter"] * self.has_adapter
        shapes = " to ".join(f"{pp} x {tp}" for pp, tp in self.shapes)
        return [f"{self.connector}, {shapes}", *found]

    @property
    def least_margin(self) -> float:
        """In nats, between tokens whose order rounding cannot change."""
        return TOLERANCE if self.is_fp8 else LEAST_MARGIN

    def config(self, model: Model, shape: tuple[int, int]) -> WorkerConfig:
        """That of a group."""
        method, path = self.drafts, model.path("a")
        if method == "wrong draft_model":
            method, path = "draft_model", model.path("b")
        places = {"kv_files": True}
        if self.connector != "files":
            places = {"kv_host_memory_bytes": self.host_bytes}
        return worker_config(
            model.path("a"),
            *shape,
            max_model_len=MAX_MODEL_LEN,
            max_num_seqs=8,
            max_num_batched_tokens=self.max_step_tokens,
            kv_cache_dtype="fp8" if self.is_fp8 else "auto",
            lora=LORA if self.has_adapter else LoraConfig(),
            speculative=drafts_by(method, path),
            enable_sleep_mode=True,
            **places,
        )


class Wanted(NamedTuple):
    """Tokens that certain weights must give."""

    weights: str
    adapter: int | None
    """Its content; None: none."""
    known: tuple[int, ...]
    """Tokens before them."""
    num_tokens: int


class ClearTokens(NamedTuple):
    """Tokens of the reference."""

    tokens: list[int]
    num_clear: int
    """The first of them, which rounding cannot change."""


@dataclass
class _Served:
    """What the reference serves."""

    kind: tuple[str, bool]
    """Settings of one have the same references."""
    setting: Setting
    model: Model
    stack: contextlib.ExitStack = field(default_factory=contextlib.ExitStack)
    drivers: dict[str, Driver] = field(default_factory=dict)
    """By weights."""
    extensions: dict[tuple[str, int], object] = field(default_factory=dict)
    """Of requests with an adapter, by weights and content."""


class Reference:
    """Groups without a connector and without drafts, that nothing disturbs: one for each of
    WEIGHTS, started when it is first needed."""

    def __init__(self, stack: contextlib.ExitStack, root: Path) -> None:
        """root: of models and adapters."""
        self._stack = stack.enter_context(contextlib.ExitStack())
        self._root = root
        self._daemons: dict[str, ForkedDaemons] = {}
        self._serving: _Served | None = None
        stack.callback(self.close)

    def serve(self, setting: Setting, model: Model) -> None:
        """Serve the model of a setting from now on."""
        kind = (model.name, setting.has_adapter)
        if self._serving is None or self._serving.kind != kind:
            self.close()
            self._serving = _Served(kind, setting, model)

    def close(self) -> None:
        """Serve nothing any more."""
        if self._serving is not None:
            self._serving.stack.close()
            self._serving = None

    def _driver(self, weights: str) -> Driver:
        """The driver of the group with these weights."""
        served = self._serving
        assert served is not None
        if weights not in served.drivers:
            if weights not in self._daemons:
                made = ForkedDaemons(["cpu"], self._root, lora_root=self._root)
                self._daemons[weights] = self._stack.enter_context(made)
            setting, model = served.setting, served.model
            config = worker_config(
                model.path(weights),
                max_model_len=MAX_MODEL_LEN,
                kv_cache_dtype="fp8" if setting.is_fp8 else "auto",
                lora=LORA if setting.has_adapter else LoraConfig(),
            )
            opened = connect(self._daemons[weights].endpoints, config)
            group, loaded = served.stack.enter_context(opened)
            served.drivers[weights] = new_driver(group, loaded)
            for content in CONTENTS if setting.has_adapter else ():
                added = group.loras.add(model.adapters[content])
                served.extensions[weights, content] = added.extension
        return served.drivers[weights]

    def tokens(self, wanted: Sequence[Wanted]) -> dict[Wanted, ClearTokens]:
        """The greedy tokens."""
        found, extensions = {}, self._serving.extensions
        for name in {each.weights: None for each in wanted}:
            driver = self._driver(name)
            own = [each for each in dict.fromkeys(wanted) if each.weights == name]
            for index, each in enumerate(own):
                features = () if each.adapter is None else (extensions[name, each.adapter],)
                request = greedy_request(
                    str(index), each.known, each.num_tokens, logprobs=2, features=features
                )
                driver.add_request(request)
            for output in driver.run():
                assert not output.error, output.error
                found[own[int(output.req_id)]] = self._clear(output)
            driver.scheduler.forget_prefixes()
        return found

    def _clear(self, output) -> ClearTokens:
        margins = np.array([each.logprobs[1] - each.logprobs[2] for each in output.logprobs])
        is_clear = margins > self._serving.setting.least_margin
        num_clear = len(margins) if is_clear.all() else int(is_clear.argmin())
        return ClearTokens(output.token_ids, num_clear)


def few_blocks(config: WorkerConfig, groups: Sequence[object]) -> int:
    """Number of blocks of a KV cache that evicts and preempts: for one long request, and little
    more."""
    scheduler, drafts = config.scheduler, config.speculative.num_speculative_tokens
    longest = scheduler.max_num_batched_tokens
    return 2 + request_blocks(MAX_MODEL_LEN + drafts, groups, longest)

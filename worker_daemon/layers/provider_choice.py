"""Chooses what computes long chunks over gathered keys: our kernel, or a library that is installed,
computes the same and is faster.

Every library runs each kind of chunk of the model once at load, where a failure costs nothing: ours
computes what it cannot. The times are kept on disk (ProviderRecords), so that a later start of the
same model imports a library only if it won, and times nothing.
"""

import logging
import time
import warnings
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

import torch
from torch import Tensor

from worker_daemon.contracts.attention import AttentionLayer, GatheredAttention
from worker_daemon.layers.prompt_providers import (
    AttendGathered,
    PromptCase,
    PromptProvider,
    ProvidedGathered,
    ScoreKind,
)
from worker_daemon.layers.provider_records import ProviderRecords, Timed
from worker_daemon.layers.torch_ops import TorchOps

Stopwatch = Callable[[Callable[[], object]], float]
"""Runs a launch a few times; returns the seconds of one."""

MAX_RELATIVE_ERROR = 2e-2
"""Bound on the relative error: bf16 causes a quarter of it, a wrong mask or scale much more."""

CHECKED = (1111, 2500)
"""(queries, keys) of the chunk whose results are compared: multiples of no tile, so that a mask
that is not aligned with the last key shows."""
TIMED = (4096, 16384)
"""(queries, keys) of the chunk that is timed: a prompt's fourth, 2 ms on an H200 with the heads of
Llama 8B."""

_LOG = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class ProviderChoice:
    """The attention of long chunks over gathered keys."""

    gathered: GatheredAttention[Tensor]
    provided: tuple[ScoreKind, ...] = ()
    """The kinds that a library computes."""
    name: str = ""
    """The library's; empty if all kinds are ours."""
    report: str = ""
    """For the status: who computes which kind, how much faster, and what the choice took; empty if
    no library is installed that could."""


def choose_provider(
    ours: GatheredAttention[Tensor],
    providers: Sequence[PromptProvider],
    case: PromptCase,
    records: ProviderRecords,
    stopwatch: Stopwatch,
) -> ProviderChoice:
    """Return the fastest of ours and the first installed library that could compute a kind of the
    case. A library that raises, or is inaccurate, is logged and left out. Waits for the device."""
    for provider in providers:
        number = provider.version
        if number is None:
            continue
        label = f"{provider.name} {number}"
        obstacles = {kind: provider.find_obstacle(case, kind) for kind in case.kinds}
        for kind, why in obstacles.items():
            if why is not None:
                _LOG.info("%s does not compute chunks with %s: %s", label, kind, why)
        kinds = tuple(kind for kind in case.kinds if obstacles[kind] is None)
        if kinds:
            with warnings.catch_warnings():  # what a library warns of as it compiles is its own
                warnings.simplefilter("ignore")
                return _try(ours, provider, label, replace(case, kinds=kinds), records, stopwatch)
    return ProviderChoice(ours)


@torch.inference_mode()
def _try(
    ours: GatheredAttention[Tensor],
    provider: PromptProvider,
    label: str,
    case: PromptCase,
    records: ProviderRecords,
    stopwatch: Stopwatch,
) -> ProviderChoice:
    """Run a library on each kind of chunk that an earlier start did not find it slow for."""
    start = time.monotonic()
    known = records.find(label, case)
    wanted = [kind for kind in case.kinds if known is None or known[kind].is_won]
    attend = _open(provider, label) if wanted else None
    if attend is None:
        return ProviderChoice(ours, report=_report(label, case, known or {}, (), known, start))
    usable = dict[ScoreKind, Timed]()
    for kind in wanted:
        times = None if known is None else known[kind]
        times = _run(ours, attend, label, case, kind, times, stopwatch)
        if times is not None:
            usable[kind] = times
    if known is None and len(usable) == len(case.kinds):
        records.keep(label, case, usable)
    provided = tuple(kind for kind, times in usable.items() if times.is_won)
    report = _report(label, case, (known or {}) | usable, provided, known, start)
    if not provided:
        return ProviderChoice(ours, report=report)
    gathered = ProvidedGathered(ours, dict.fromkeys(provided, attend))
    return ProviderChoice(gathered, provided, provider.name, report)


def _open(provider: PromptProvider, label: str) -> AttendGathered | None:
    start = time.monotonic()
    try:
        attend = provider.open()
    except Exception as failure:  # libraries raise what they like
        _LOG.warning("long chunks are ours: %s cannot be loaded: %r", label, failure)
        return None
    _LOG.info("%s loaded in %.1f s", label, time.monotonic() - start)
    return attend


def _run(
    ours: GatheredAttention[Tensor],
    theirs: AttendGathered,
    label: str,
    case: PromptCase,
    kind: ScoreKind,
    known: Timed | None,
    stopwatch: Stopwatch,
) -> Timed | None:
    """Compare a library's results with ours, which compiles its kernel; return its times, known or
    measured. None if it raises or is inaccurate, which is logged."""
    start = time.monotonic()
    try:
        error = _relative_error(theirs, ours, RandomChunk(case, kind, *CHECKED))
        if not error < MAX_RELATIVE_ERROR:
            _LOG.warning("%s is not used for %s: relative error %.2g", label, kind, error)
            return None
        _LOG.info("%s is ready for %s after %.1f s", label, kind, time.monotonic() - start)
        if known is not None:
            return known
        chunk = RandomChunk(case, kind, *TIMED)
        return Timed(
            stopwatch(lambda: theirs(*chunk.arguments)),
            stopwatch(lambda: ours.attend(*chunk.arguments)),
        )
    except Exception as failure:  # libraries raise what they like
        _LOG.warning("%s is not used for %s: %r", label, kind, failure)
        return None


class _Sinks(NamedTuple):
    """AttentionSinks with given values."""

    values: Tensor


class RandomChunk:
    """Random arguments of GatheredAttention.attend, laid out as in a step."""

    def __init__(self, case: PromptCase, kind: ScoreKind, num_queries: int, num_keys: int) -> None:
        """num_keys: of the whole sequence; a window may see fewer."""
        heads = case.heads
        num_q_heads, num_kv_heads = heads.num_attention_heads, heads.num_key_value_heads
        random = torch.Generator(case.device).manual_seed(0)

        def draw(*shape: int) -> Tensor:
            return torch.randn(shape, generator=random, device=case.device, dtype=case.dtype)

        qkv = draw(num_queries, num_q_heads + 2 * num_kv_heads, heads.head_dim)
        if kind.window is not None:
            num_keys = min(num_keys, num_queries + kind.window - 1)
        context = draw(2, num_keys, num_kv_heads, heads.head_dim)
        layer = AttentionLayer(
            TorchOps(),
            num_kv_heads,
            heads.head_dim,
            heads.head_dim**-0.5,
            kind.window,
            norms=None,
            logit_softcap=kind.logit_softcap,
            sinks=_Sinks(draw(num_q_heads)) if kind.has_sinks else None,
        )
        self.arguments = qkv[:, :num_q_heads], context, layer, kind.window


def _relative_error(
    theirs: AttendGathered, ours: GatheredAttention[Tensor], chunk: RandomChunk
) -> float:
    expected, found = ours.attend(*chunk.arguments).float(), theirs(*chunk.arguments).float()
    if found.shape != expected.shape:
        return float("inf")
    norm = torch.linalg.vector_norm
    return float(norm(found - expected) / norm(expected))


def _report(
    label: str,
    case: PromptCase,
    timed: Mapping[ScoreKind, Timed],
    provided: Collection[ScoreKind],
    known: Mapping[ScoreKind, Timed] | None,
    start: float,
) -> str:
    """Return, and log, who computes which kind. start: of the choice, in seconds of monotonic()."""
    shown = list[str]()
    for kind in case.kinds:
        gain = f"{timed[kind].ours / timed[kind].theirs:.2f} times as fast" if kind in timed else ""
        if kind in provided:
            shown.append(f"{kind}: {label}, {gain}")
        else:
            shown.append(f"{kind}: ours" + (f" ({label} {gain})" if gain else ""))
    how = "measured before" if known is not None else "measured" if timed else "not measured"
    report = f"{'; '.join(shown)}; {how}, {time.monotonic() - start:.1f} s"
    _LOG.info("attention of long chunks: %s", report)
    return report


_LAUNCHES = 5
"""In a series: the host's part of all but the first is hidden behind the device's, as in a step."""


def device_seconds(launch: Callable[[], object]) -> float:
    """Stopwatch of the current CUDA device: the least mean of three series of launches."""
    launch()
    return min(_series_seconds(launch) for _ in range(3))


def _series_seconds(launch: Callable[[], object]) -> float:
    start = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
    end = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
    start.record()
    for _ in range(_LAUNCHES):
        launch()
    end.record()
    end.synchronize()
    milliseconds: float = start.elapsed_time(end)
    return milliseconds / 1e3 / _LAUNCHES

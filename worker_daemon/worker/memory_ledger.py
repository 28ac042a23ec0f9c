"""What of the memory is used for what, and how much of it a KV cache could have. Measures while
memory is taken; knows no model, and no device but by its source.
"""

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Final, Literal, TypeAlias

from rpc_schema.lifecycle import KVCacheAdvice
from worker_daemon.device.memory import MemorySnapshot, MemorySource

CUSHION_BYTES: Final = 150 << 20
"""What is left of a card that is filled: a driver's or a library's small change."""

Kind: TypeAlias = Literal["weights", "kv_cache", "graphs"]

_KINDS: Final[tuple[Kind, ...]] = ("weights", "kv_cache", "graphs")


@dataclass(frozen=True, slots=True)
class _Taken:
    """Bytes that one kind took."""

    device: int = 0
    """Of the device, whoever gave them."""
    allocated: int = 0
    """Of them in the allocator's tensors."""
    reserved: int = 0
    """Of them by the allocator."""


_NOTHING: Final = _Taken()


class MemoryLedger:
    """One device's, from its baseline on. Owned by the worker; used on the step thread."""

    def __init__(self, source: MemorySource, baseline: MemorySnapshot, budget: int) -> None:
        """budget: bytes that this worker may take beyond the baseline."""
        self._source = source
        self._baseline = baseline
        self._budget = budget
        self._taken: dict[Kind, _Taken] = {}
        self.activations_peak = 0
        """What the largest step took at its peak, by the last profile."""
        self.advice: KVCacheAdvice | None = None
        """What advise() found last; None until then, and once what it was about is gone."""

    @contextmanager
    def taking(self, kind: Kind) -> Iterator[None]:
        """Measure what is taken for a kind in here, in place of what was before; nothing is noted
        where it fails."""
        before = self._source.snapshot()
        yield
        now = self._source.snapshot()
        self._taken[kind] = _Taken(
            max(0, self._source.taken_since(before, now)),
            max(0, now.allocated - before.allocated),
            max(0, now.reserved - before.reserved),
        )

    def forget(self, *kinds: Kind) -> None:
        """What these kinds had was given back."""
        self.advice = None
        for kind in kinds:
            self._taken.pop(kind, None)

    def by_kind(self, sizes: Mapping[Kind, int]) -> dict[str, int]:
        """Return what is used now, by kind. sizes: kinds whose size is known exactly.

        weights, kv_cache, graphs; activations: what the allocator has beside these, for steps and
        between them; context: the rest of what this process has, that is the device's context,
        communicators, library handles and code, and whatever others have where NVML does not tell;
        others: other processes, where it does. The sum of these is total less free on a GPU; on the
        CPU a cache's pages are not there before they are used. And activations_peak, free, total.
        """
        now = self._source.snapshot()
        own = self._source.own_bytes(now)
        exact = {str(kind): sizes.get(kind, self._of(kind).device) for kind in _KINDS}
        activations = self._activations(now)
        kinds: dict[str, int] = {
            **exact,
            "activations": activations,
            "context": max(0, own - sum(exact.values()) - activations),
        }
        if now.others is not None:
            kinds["others"] = max(0, now.total - now.free - own)
        return kinds | {
            "activations_peak": self.activations_peak,
            "free": now.free,
            "total": now.total,
        }

    def advise(self) -> KVCacheAdvice:
        """Return how large a KV cache could be, by what is in use now: to be asked after
        warm-up."""
        now = self._source.snapshot()
        kv_cache = self._of("kv_cache").device
        # What a largest step would still take of the device: its cached memory may be gone.
        short = max(0, self.activations_peak - self._activations(now))
        beside = max(0, self._source.taken_since(self._baseline, now) - kv_cache) + short
        self.advice = KVCacheAdvice(
            request_bytes=max(0, self._budget - beside),
            card_bytes=max(0, kv_cache + now.free - short - CUSHION_BYTES),
        )
        return self.advice

    def _activations(self, now: MemorySnapshot) -> int:
        tensors = self._of("weights").allocated + self._of("kv_cache").allocated
        known = self._baseline.reserved + tensors + self._of("graphs").reserved
        return max(0, now.reserved - known)

    def _of(self, kind: Kind) -> _Taken:
        return self._taken.get(kind, _NOTHING)


def memory_line(kinds: Mapping[str, int]) -> str:
    """Return the kinds as one line for a log."""
    return ", ".join(f"{kind} {num_bytes / 1e9:.3f} GB" for kind, num_bytes in kinds.items())

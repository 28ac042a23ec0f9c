"""Accounts for memory by use, and advises on the size of a KV cache. Measures while memory is
allocated."""

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Final, Literal, TypeAlias

from rpc_schema.lifecycle import KVCacheAdvice
from worker_daemon.device.memory import MemorySnapshot, MemorySource

CUSHION_BYTES: Final = 150 << 20
"""Bytes to leave free on a card that is filled, for small allocations of the driver and of
libraries."""

Kind: TypeAlias = Literal["weights", "kv_cache", "graphs", "adapters"]
"""adapters: the slots of LoRA adapters, which are allocated with the weights."""

_KINDS: Final[tuple[Kind, ...]] = ("weights", "kv_cache", "graphs")


@dataclass(frozen=True, slots=True)
class _Taken:
    """Bytes that one kind allocated."""

    device: int = 0
    """Device memory, from any allocator."""
    allocated: int = 0
    """The part in tensors of the allocator."""
    reserved: int = 0
    """The part that the allocator reserved."""


_NOTHING: Final = _Taken()


class MemoryLedger:
    """The ledger of one device, from its baseline on. Owned by the worker; used on the step
    thread."""

    def __init__(self, source: MemorySource, baseline: MemorySnapshot, budget: int) -> None:
        """budget: bytes that this worker may allocate beyond the baseline."""
        self._source = source
        self._baseline = baseline
        self._budget = budget
        self._taken: dict[Kind, _Taken] = {}
        self.activations_peak = 0
        """The peak of the largest step, by the last profile."""
        self.advice: KVCacheAdvice | None = None
        """The last result of advise(); None before the first, and after forget()."""

    @contextmanager
    def taking(self, kind: Kind) -> Iterator[None]:
        """Record the memory that the block allocates as the kind's, replacing its previous record;
        record nothing if the block fails."""
        before = self._source.snapshot()
        yield
        now = self._source.snapshot()
        self._taken[kind] = _Taken(
            max(0, self._source.taken_since(before, now)),
            max(0, now.allocated - before.allocated),
            max(0, now.reserved - before.reserved),
        )

    def forget(self, *kinds: Kind) -> None:
        """Record that the memory of these kinds was freed."""
        self.advice = None
        for kind in kinds:
            self._taken.pop(kind, None)

    def by_kind(self, sizes: Mapping[Kind, int]) -> dict[str, int]:
        """Return the memory used now, by kind. sizes: kinds whose size is known exactly.

        The kinds: weights, kv_cache, graphs; activations: the allocator's other memory, for steps
        and between them; context: the rest of this process's memory, that is the device's context,
        communicators, library handles and code, plus other processes' memory if NVML does not
        report it; others: other processes, if NVML reports them. Their sum is total minus free on a
        GPU; on the CPU the pages of a cache exist only once used. Also: activations_peak, free,
        total.
        """
        now = self._source.snapshot()
        own = self._source.own_bytes(now)
        exact = {str(kind): self._of(kind).device for kind in _KINDS}
        exact |= {str(kind): size for kind, size in sizes.items()}
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
        """Return how large a KV cache could be, from the memory in use now; called after
        warm-up."""
        now = self._source.snapshot()
        kv_cache = self._of("kv_cache").device
        # What the largest step would still allocate: its cached memory may have been freed.
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
    """Return the kinds as one line for the log."""
    return ", ".join(f"{kind} {num_bytes / 1e9:.3f} GB" for kind, num_bytes in kinds.items())

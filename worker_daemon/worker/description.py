"""What a worker says about itself between operations: a value that any thread may read. Knows no
thread and no socket."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

from rpc_schema.config import WorkerConfig
from rpc_schema.kv_cache import KVCacheConfig
from rpc_schema.lifecycle import KVCacheAdvice, MemoryTag, TagState
from worker_daemon.models.weight_state import WeightReport


def no_weights() -> None:
    """Nothing is loaded."""
    return


@dataclass(frozen=True, slots=True)
class WorkerDescription:
    """Made on the step thread after every lifecycle operation and published by reference."""

    device: str
    config: WorkerConfig | None = None
    """What is loaded; None below MODEL_LOADED."""
    kv_cache: KVCacheConfig | None = None
    memory_bytes: Mapping[str, int] = field(default_factory=dict)
    """Device (or host) memory by use (MemoryLedger.by_kind), and what TaggedMemory.bytes_by_kind
    names."""
    kv_cache_advice: KVCacheAdvice | None = None
    """Once warm."""
    memory_tags: Mapping[MemoryTag, TagState] = field(default_factory=dict)
    """Empty where memory cannot sleep."""
    providers: Mapping[str, str] = field(default_factory=dict)
    """What serves each part of a step."""
    weights: Callable[[], WeightReport | None] = no_weights
    """Reads what the weights are worth now; None below MODEL_LOADED."""
    num_kv_blocks_held: Callable[[], int] = int
    """Reads how many KV blocks running requests have now."""
    input_wait_share: Callable[[], float] = float
    """Reads the share of its time for which the stage now waits for its input."""

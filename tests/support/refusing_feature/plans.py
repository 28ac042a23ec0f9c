"""Messages between a test and a driver of the copy."""

import msgspec

from rpc_schema.config import WorkerConfig


class Wanted(msgspec.Struct):
    """A request."""

    id: str
    prompt: list[int]
    max_tokens: int
    percent: int
    """Percentage of its tokens to refuse; 0: without the feature."""


class Plan(msgspec.Struct):
    """A driver's plan."""

    endpoints: list[str]
    config: WorkerConfig
    wanted: list[Wanted]
    num_gpu_blocks: int
    adopt: bool
    dies_after: int | None
    """Results before it dies; with defers, steps, whose last one is not sampled."""
    defers: bool = False
    """True: a separate request samples each step."""


class Outcome(msgspec.Struct):
    """The driver's output."""

    num_adopted: int
    num_warm: int
    """Number of adopted requests that continue from existing KV."""
    num_groups: int
    """Number of KV groups."""
    num_preemptions: int
    num_refused: int
    tokens: dict[str, list[int]]

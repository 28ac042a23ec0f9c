"""What a test tells a driver of the copy, and what it hears of it."""

import msgspec

from rpc_schema.config import WorkerConfig


class Wanted(msgspec.Struct):
    """A request."""

    id: str
    prompt: list[int]
    max_tokens: int
    percent: int
    """Of its tokens, refused; 0: it goes without the feature."""


class Plan(msgspec.Struct):
    """A driver's life."""

    endpoints: list[str]
    config: WorkerConfig
    wanted: list[Wanted]
    num_gpu_blocks: int
    adopt: bool
    dies_after: int | None
    """Results; with defers, steps of which the last one is not sampled."""
    defers: bool = False
    """Steps are sampled by a request of their own."""


class Outcome(msgspec.Struct):
    """What it prints."""

    num_adopted: int
    num_warm: int
    """Of these, how many go on from KV that is there."""
    num_groups: int
    """Of layers, each with its window."""
    num_preemptions: int
    num_refused: int
    tokens: dict[str, list[int]]

"""Messages between a test and a driver of the copy."""

import msgspec

from rpc_schema.config import WorkerConfig


class Wanted(msgspec.Struct):
    """A request."""

    id: str
    prompt: list[int]
    max_tokens: int
    token_id: int
    bias: float | None
    """None: without the feature."""


class Plan(msgspec.Struct):
    """A driver's plan."""

    endpoints: list[str]
    config: WorkerConfig
    wanted: list[Wanted]
    num_gpu_blocks: int
    adopt: bool
    dies_after: int | None
    """Results."""


class Outcome(msgspec.Struct):
    """The driver's output."""

    num_adopted: int
    num_preemptions: int
    tokens: dict[str, list[int]]

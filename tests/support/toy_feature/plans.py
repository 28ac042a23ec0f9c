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
    num_checked: int = 0
    """Number of its last tokens to check; 0: without that feature."""


class Checked(msgspec.Struct):
    """The samples of a request in a step."""

    req_id: str
    num_tokens: int
    """Tokens that the request had before."""
    token_ids: list[int]


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
    checked: list[Checked]
    refusal: str
    """Why a request that asks for too many samples is refused."""

"""How one request's tokens are chosen, as the worker needs it. Stopping is the driver's
business."""

from typing import Annotated

from msgspec import Meta

from rpc_schema.base import Count, Fraction, Unsigned, Value

MAX_LOGPROBS = 20

MAX_STOP_TOKEN_IDS = 1024
"""Of one request, the model's own end-of-sequence tokens included."""

MIN_TEMPERATURE = 1e-5
"""Logits divided by less than this may leave float32: below it, only 0 is a temperature."""


class SamplingParams(Value, frozen=True, kw_only=True):
    """One request's sampling. The same (seed, position, logits) gives the same token in any batch
    and any parallel shape."""

    temperature: Annotated[float, Meta(ge=0.0, le=1e6)] = 0.0
    """0 takes the most likely token; the other fields but min_tokens and logprobs are then without
    effect."""
    top_k: Count = 0
    """Keep the k most likely tokens; 0 keeps all."""
    top_p: Annotated[float, Meta(ge=1e-6, le=1.0)] = 1.0
    min_p: Fraction = 0.0
    seed: Unsigned = 0
    """Given by the client where the caller gave none."""
    min_tokens: Count = 0
    """No stop token is sampled before this many output tokens."""
    stop_token_ids: tuple[Count, ...] = ()
    """What min_tokens bans: the request's stop tokens, end of sequence included; at most
    MAX_STOP_TOKEN_IDS."""
    logprobs: Annotated[int, Meta(ge=0, le=MAX_LOGPROBS)] | None = None
    """Return the log probability of each sampled token and of the n most likely ones; None returns
    none."""

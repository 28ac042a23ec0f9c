"""Pooling: requests that return values computed from hidden states instead of tokens."""

from collections.abc import Iterable
from typing import Annotated, Final, Literal, TypeAlias

from msgspec import Meta

from rpc_schema.base import Count, Extension, FramedExtension, Positive, RawInt32, RawUInt16, Value
from rpc_schema.sampling import SamplingExtension

PoolingTask: TypeAlias = Literal["embed", "classify", "token_embed", "token_classify"]
"""embed: one vector for a prompt; classify: its scores, one per label. The token_ tasks give one
row per token of the prompt."""

PooledStates: TypeAlias = Literal["last", "first", "mean", "each"]
"""Hidden states that an output is computed from: that of the prompt's last or first token, the mean
of all, or each one separately."""

MAX_POOLED_BYTES: Final = 12 << 20
"""Bound on the outputs of one step, which are part of its reply."""

MAX_KEPT_BYTES: Final = 64 << 20
"""Bound on the outputs that a rank keeps for the computed chunks of unfinished prompts."""

VALUE_BYTES: Final = 4
"""Bytes of a float32."""


class PoolingParams(Extension, frozen=True, tag=9, kw_only=True):
    """Pooling of a prompt's hidden states. The request samples nothing, and ends with the step that
    computes the prompt's last token."""

    task: PoolingTask
    use_activation: bool | None = None
    """Normalize an embedding to length 1, or turn the scores of a classification into
    probabilities. None: the model's files decide."""
    dimensions: Count = 0
    """Number of leading values of an embedding to keep, before it is normalized; 0: all."""
    second_start: Count | None = None
    """Index of the first prompt token of token type 1, as in the second text of a pair; at most the
    prompt's length. None: all tokens have type 0."""


class PooledOutputs(FramedExtension, frozen=True, tag=9, kw_only=True):
    """Outputs of the requests that ended with a step. One frame of float32: the rows of each
    request, one request after the other."""

    slots: RawUInt16
    """Slots of these requests, in the order of the frame."""
    sizes: RawInt32
    """Pairs (rows, values per row), one for each slot."""

    @property
    def num_frames(self) -> int:
        return 1


class PooledTask(Value, frozen=True, kw_only=True):
    """A task that the loaded model supports."""

    task: PoolingTask
    width: Positive
    """Values in an output row."""
    states: PooledStates
    """Any except "last" needs every token of the prompt computed, so it reuses no cached prefix."""


class PoolingSupport(Value, frozen=True, kw_only=True):
    """The pooling that the loaded model supports."""

    tasks: Annotated[tuple[PooledTask, ...], Meta(max_length=4)] = ()
    whole_prompts: bool = False
    """True if a prompt must be computed in one step, because all its tokens attend to each
    other."""
    token_types: bool = False
    """True if the model tells the two texts of a pair apart by token types."""

    def find(self, task: PoolingTask) -> PooledTask | None:
        """Return a task, if the model supports it."""
        return next((each for each in self.tasks if each.task == task), None)

    @property
    def names(self) -> str:
        """Names of the tasks, for messages."""
        return ", ".join(each.task for each in self.tasks) or "none"


NO_POOLING: Final = PoolingSupport()


def sampling_kind(extensions: Iterable[Extension]) -> str | None:
    """Return the name of the first sampling extension, if there is one. A pooling request may have
    none."""
    found = (each for each in extensions if isinstance(each, SamplingExtension))
    return next((type(each).__name__ for each in found), None)


def pooling_fault(
    params: PoolingParams, support: PoolingSupport, num_tokens: int
) -> tuple[str, object, str] | None:
    """Return field, value and fix of the first unsupported setting; None if the model supports
    all. num_tokens: of the prompt."""
    found, second = support.find(params.task), params.second_start
    if found is None:
        return "task", params.task, f"ask for one of the model's tasks: {support.names}"
    if second is not None and (not support.token_types or second > num_tokens):
        fix = f"use at most {num_tokens}, the length of the prompt"
        if not support.token_types:
            fix = "leave it out: the model has one token type"
        return "second_start", second, fix
    if not params.dimensions:
        return None
    if params.task not in ("embed", "token_embed"):
        return "dimensions", params.dimensions, "leave it out: it shortens embeddings alone"
    if params.dimensions > found.width:
        return "dimensions", params.dimensions, f"use at most {found.width}"
    return None


def admission_fault(
    params: PoolingParams,
    num_tokens: int,
    num_computed_tokens: int,
    support: PoolingSupport,
    max_num_batched_tokens: int,
) -> tuple[str, object, str] | None:
    """Return field, value and fix of the first reason to refuse a new request; None if there is
    none."""
    fault = pooling_fault(params, support, num_tokens)
    if fault is not None:
        return fault
    found = support.find(params.task)
    needs_all = support.whole_prompts or (found is not None and found.states != "last")
    if needs_all and num_computed_tokens:
        fix = "give 0: its output needs the hidden states of all tokens"
        return "num_computed_tokens", num_computed_tokens, fix
    if support.whole_prompts and num_tokens > max_num_batched_tokens:
        fix = f"use at most max_num_batched_tokens = {max_num_batched_tokens} tokens: the model "
        return "num_tokens", num_tokens, fix + "computes a prompt in one step"
    return output_fault(params, num_tokens, support)


def output_fault(
    params: PoolingParams, num_tokens: int, support: PoolingSupport
) -> tuple[str, object, str] | None:
    """Return field, value and fix if no reply can hold the output of so many tokens. The model must
    support the task."""
    num_bytes = pooled_bytes(params, num_tokens, support)
    if num_bytes <= MAX_POOLED_BYTES:
        return None
    most = MAX_POOLED_BYTES * num_tokens // num_bytes
    return "num_tokens", num_tokens, f"use at most {most} tokens, or fewer dimensions"


def pooled_bytes(params: PoolingParams, num_tokens: int, support: PoolingSupport) -> int:
    """Return the bytes of a request's output. The model must support the task."""
    found = support.find(params.task)
    assert found is not None, "the task was checked"
    rows = num_tokens if found.states == "each" else 1
    return rows * (params.dimensions or found.width) * VALUE_BYTES

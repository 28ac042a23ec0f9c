"""Prompts with embeddings in place of token ids: their tensors, and the positions that the rows
fill."""

from collections.abc import Sequence
from typing import Any, TypeAlias, get_args

import numpy as np
from numpy.typing import ArrayLike, NDArray

from rpc_schema.prompt_embeds import (
    MAX_EMBEDDED_RANGES,
    EmbeddedRange,
    EmbedsDtype,
    PromptEmbeds,
)
from worker_client.errors import ClientConfigError, RequestError
from worker_client.inputs.host_tensor import HostTensor

Embeddings: TypeAlias = NDArray[Any] | HostTensor
"""[rows, hidden size]: an array of float32 or float16, or a HostTensor, which may also be bfloat16
and is already hashed."""

Ranges: TypeAlias = Sequence[Sequence[int]]
"""Pairs (start, length): positions in the whole prompt that the rows fill, in order. Empty: the
first positions."""

PLACEHOLDER = 0
"""Token id at embedded positions. Any valid id would do: its embedding is not used."""

_DTYPES: tuple[str, ...] = get_args(EmbedsDtype)


def check_embeds(embeds: object, ranges: Ranges) -> None:
    """Check embeddings and their positions, without a look at the values.

    Raises:
        RequestError: they are no array or HostTensor, the dtype is not supported, there are no
            rows, the shape is not [rows, hidden size], or the positions are malformed or not as
            many as the rows.
    """
    if embeds is None:
        raise _refused("prompt_embeds_at", ranges, "give prompt_embeds too")
    if not isinstance(embeds, np.ndarray | HostTensor):
        raise _refused("prompt_embeds", type(embeds).__name__, "give an array or a HostTensor")
    if isinstance(embeds, HostTensor) and not embeds.is_whole:
        fix = "make it with HostTensor.from_array or from_bytes"
        raise _refused("prompt_embeds", "a HostTensor", fix)
    dtype = embeds.dtype if isinstance(embeds, HostTensor) else embeds.dtype.name
    if dtype not in _DTYPES:
        raise _refused("prompt_embeds", dtype, f"use one of {', '.join(_DTYPES)}")
    if len(embeds.shape) != 2 or not all(embeds.shape):
        raise _refused("prompt_embeds", list(embeds.shape), "give [rows, hidden size]")
    _checked(embeds.shape[0], ranges)


def host_tensor(embeds: Embeddings) -> HostTensor:
    """Return embeddings as a tensor with its hash. Raises RequestError as check_embeds does."""
    check_embeds(embeds, ())
    if isinstance(embeds, HostTensor):
        return embeds
    try:
        return HostTensor.from_array(embeds)
    except ClientConfigError as error:
        raise _refused("prompt_embeds", error.value, error.fix) from None


def embeds_extension(tensor: HostTensor, ranges: Ranges) -> PromptEmbeds:
    """Return the extension of a request whose rows fill these positions.

    Raises:
        RequestError: they are malformed, or their number is not that of the rows.
    """
    return PromptEmbeds(
        content_hash=tensor.content_hash,
        dtype=tensor.dtype,  # type: ignore[arg-type]  # host_tensor has checked it
        width=tensor.shape[1],
        ranges=tuple(
            EmbeddedRange(start=start, length=length)
            for start, length in _checked(tensor.shape[0], ranges)
        ),
    )


def with_placeholders(
    token_ids: ArrayLike, num_rows: int, ranges: Ranges = ()
) -> NDArray[np.int32]:
    """Return the token ids of a whole prompt: those given, in order, with placeholders at the
    positions of its embeddings.

    Raises:
        RequestError: the positions are malformed or beyond the prompt, or their number is not that
            of the rows.
    """
    given = np.asarray(token_ids, np.int32)
    is_embedded = np.zeros(given.size + num_rows, np.bool_)
    for start, length in _checked(num_rows, ranges):
        taken = is_embedded[start : start + length]
        if taken.size < length or taken.any():
            fix = f"give ranges within the prompt of {is_embedded.size}, apart from each other"
            raise _refused("prompt_embeds_at", [start, length], fix)
        taken[:] = True
    prompt = np.full(is_embedded.size, PLACEHOLDER, np.int32)
    prompt[~is_embedded] = given
    return prompt


def _checked(num_rows: int, ranges: Ranges) -> list[tuple[int, int]]:
    if len(ranges) == 0:
        return [(0, num_rows)]
    pairs = []
    for each in ranges:
        if len(each) != 2 or not all(isinstance(value, int) for value in each):
            raise _refused("prompt_embeds_at", each, "give pairs (start, length)")
        start, length = each
        if start < 0 or length < 1:
            raise _refused("prompt_embeds_at", each, "use starts from 0 and lengths from 1")
        pairs.append((start, length))
    total = sum(length for _, length in pairs)
    if len(pairs) > MAX_EMBEDDED_RANGES:
        fix = f"give at most {MAX_EMBEDDED_RANGES}"
        raise _refused("prompt_embeds_at", f"{len(pairs)} ranges", fix)
    if total != num_rows:
        fix = f"give ranges of {num_rows} positions in all, one for each row"
        raise _refused("prompt_embeds_at", f"{total} positions", fix)
    return pairs


def _refused(field: str, value: object, fix: str) -> RequestError:
    return RequestError("the embeddings are refused", field=field, value=value, fix=fix)

"""Experts that a request brings for its first tokens: checked, and their tensor.

Shapes: P positions, L layers with experts, K experts of a token.
"""

from typing import Any, Final, NoReturn, TypeAlias

import numpy as np
from numpy.typing import NDArray

from rpc_schema.routed_experts import ReplayExperts
from rpc_schema.uploads import MAX_UPLOAD_BYTES
from worker_client.errors import RequestError
from worker_client.inputs.host_tensor import HostTensor

ExpertsToReplay: TypeAlias = NDArray[Any] | HostTensor
"""[P, L, K]: an array of integers, or a HostTensor of uint8 (uint16 if a number is above 255),
which is already hashed."""

MAX_EXPERT: Final = 2**15 - 1

_FIX: Final = "give an array of integers, [positions, layers with experts, top_k]"


def check_replayed(experts: object, num_tokens: int) -> None:
    """Check the experts of a request of num_tokens tokens.

    Raises:
        RequestError: they are no array of numbers of experts, or there are none for a token, or
            those of more tokens than the request has, or more than can be uploaded.
    """
    values = _values(experts)
    if values.ndim != 3:
        _refuse(f"{values.dtype} {list(values.shape)}")
    if not values.size or len(values) > num_tokens:
        fix = f"give the experts of 1 to {num_tokens} tokens: [positions, layers, top_k]"
        _refuse(list(values.shape), fix)
    low, high = int(values.min()), int(values.max())
    if low < 0 or high > MAX_EXPERT:
        _refuse(low if low < 0 else high, "give the numbers of experts, from 0")
    num_bytes = values.size * _dtype(values).itemsize
    if num_bytes > MAX_UPLOAD_BYTES:
        most = MAX_UPLOAD_BYTES * len(values) // num_bytes
        _refuse(list(values.shape), f"give the experts of at most {most} tokens: {num_bytes} bytes")


def replayed_tensor(experts: ExpertsToReplay) -> HostTensor:
    """Return checked experts as a tensor with its hash."""
    if isinstance(experts, HostTensor):
        return experts
    return HostTensor.from_array(experts.astype(_dtype(experts)))


def replay_extension(experts: ExpertsToReplay, num_tokens: int) -> ReplayExperts:
    """Return the extension of a request of num_tokens tokens that brings experts. Raises
    RequestError as check_replayed does."""
    check_replayed(experts, num_tokens)
    tensor = replayed_tensor(experts)
    count, num_layers, top_k = tensor.shape
    return ReplayExperts(
        num_positions=count,
        num_layers=num_layers,
        top_k=top_k,
        max_expert=int(_values(tensor).max()),
        content_hash=tensor.content_hash,
    )


def _values(experts: object) -> NDArray[Any]:
    """Return experts as an array. Raises RequestError: they are none of integers, or a tensor of
    another dtype than it should have."""
    if isinstance(experts, HostTensor):
        if experts.is_whole and experts.dtype in ("uint8", "uint16"):
            kind = np.dtype(experts.dtype).newbyteorder("<")
            values = np.frombuffer(experts.data, kind).reshape(experts.shape)
            if kind.itemsize == _dtype(values).itemsize:
                return values
        _refuse("a HostTensor", "give one of uint8, or of uint16 if a number is above 255")
    if not isinstance(experts, np.ndarray):
        _refuse(experts)
    if experts.dtype.kind not in "iu":
        _refuse(f"{experts.dtype} {list(experts.shape)}")
    return experts


def _dtype(experts: NDArray[Any]) -> np.dtype[Any]:
    return np.dtype(np.uint8 if experts.max() < 256 else np.uint16)


def _refuse(value: object, fix: str = _FIX) -> NoReturn:
    message = "the experts to replay are malformed"
    raise RequestError(message, field="replay_experts", value=value, fix=fix)

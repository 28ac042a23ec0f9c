"""Experts that a request brings for its first tokens, checked."""

from hashlib import blake2b
from typing import Any, Final, NoReturn

import numpy as np
from numpy.typing import NDArray

from rpc_schema.base import HASH_BYTES
from rpc_schema.routed_experts import ReplayExperts
from worker_client.errors import RequestError

MAX_EXPERT: Final = 2**15 - 1

_FIX: Final = "give an array of integers, [positions, layers with experts, top_k]"


def replay_extension(experts: NDArray[Any], num_tokens: int) -> ReplayExperts:
    """Return the extension of a request of num_tokens tokens that brings experts [P, L, K].

    Raises:
        RequestError: it is no array of numbers of experts, or has none for a token, or more tokens
            than the request.
    """
    given: object = experts
    if not isinstance(given, np.ndarray) or given.dtype.kind not in "iu" or given.ndim != 3:
        _refuse(f"{given.dtype} {list(given.shape)}" if isinstance(given, np.ndarray) else given)
    if not given.size or len(given) > num_tokens:
        fix = f"give the experts of 1 to {num_tokens} tokens: [positions, layers, top_k]"
        _refuse(list(given.shape), fix)
    low, high = int(given.min()), int(given.max())
    if low < 0 or high > MAX_EXPERT:
        _refuse(low if low < 0 else high, "give the numbers of experts, from 0")
    count, num_layers, top_k = given.shape
    return ReplayExperts(
        num_positions=count,
        num_layers=num_layers,
        top_k=top_k,
        max_expert=high,
        content_hash=blake2b(given.astype("<u2").tobytes(), digest_size=HASH_BYTES).digest(),
    )


def _refuse(value: object, fix: str = _FIX) -> NoReturn:
    message = "the experts to replay are malformed"
    raise RequestError(message, field="replay_experts", value=value, fix=fix)

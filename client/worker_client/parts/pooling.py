"""The driver's side of pooling."""

from collections.abc import Mapping, Sequence

import numpy as np
from numpy.typing import NDArray

from rpc_schema.codec import Frame
from rpc_schema.errors import BadFrameError
from rpc_schema.pooling import VALUE_BYTES, PooledOutputs, PoolingParams, pooling_fault
from worker_client.parts.interface import ExtensionFault, ModelBounds, RequestPart


class PoolingRequestPart(RequestPart):
    """Outputs made of hidden states. The KV of a request does not depend on it."""

    extension = PoolingParams
    reply_extension = PooledOutputs
    pools = True
    judges_prompt = True

    def find_fault(self, extension: PoolingParams, bounds: ModelBounds) -> ExtensionFault | None:
        if bounds.pooling is None:
            return None
        fault = pooling_fault(extension, bounds.pooling, bounds.num_prompt_tokens)
        return None if fault is None else ExtensionFault(*fault)

    def read_outputs(
        self, extension: PooledOutputs, frames: Sequence[Frame], ended: Mapping[int, str]
    ) -> Mapping[str, NDArray[np.float32]]:
        slots, sizes = extension.slots, extension.sizes
        if len(slots) % 2 or len(sizes) != 4 * len(slots):
            raise BadFrameError("the columns of PooledOutputs do not fit each other")
        pairs = np.frombuffer(sizes, "<i4").astype(np.int64).reshape(-1, 2)
        counts = pairs.prod(axis=1)
        (frame,) = frames
        if (pairs < 1).any() or len(frame) != VALUE_BYTES * int(counts.sum()):
            raise BadFrameError(
                f"a frame of {len(frame)} bytes has outputs of {pairs.tolist()[:8]}"
            )
        names = np.frombuffer(slots, "<u2").tolist()
        if sorted(names) != sorted(ended):
            raise BadFrameError(f"outputs of slots {names[:8]}, the step ends {sorted(ended)[:8]}")
        values = np.split(np.frombuffer(frame, "<f4"), np.cumsum(counts)[:-1])
        return {
            ended[slot]: own.reshape(size).astype(np.float32, copy=False)
            for slot, own, size in zip(names, values, pairs.tolist(), strict=True)
        }

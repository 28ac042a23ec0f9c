"""The scales of a layer's keys and values in FP8: where checkpoints and saved sets have them, and
their memory."""

import torch
from torch import Tensor

from worker_daemon.layers.parameter import Parameter, Piece
from worker_daemon.layers.setup import LayerSetup


class HeadScales:
    """KVScales of the KV heads of one layer on this rank. 1 until loaded.

    A model buffer rather than a weight: checkpoints may lack them, weight updates keep them, and
    they survive sleep at any level (worker/sleep_memory.py).
    """

    def __init__(
        self, prefix: str, total: int, first_head: int, num_heads: int, setup: LayerSetup
    ) -> None:
        """prefix: the checkpoint's name of the attention. total: KV heads of the model, of which
        this rank has num_heads from first_head on."""
        self.prefix = prefix
        self.heads = slice(first_head, first_head + num_heads)
        """This rank's heads among those of the model."""
        self.total = total
        pieces = (
            Piece(f"{prefix}.{name}", (total,), (self.heads,), (slice(start, start + num_heads),))
            for name, start in (("k_scale", 0), ("v_scale", num_heads))
        )
        self.parameter = Parameter(
            (2 * num_heads,),
            pieces,
            name=f"{prefix}.kv_scale",
            dtype=torch.float32,
            device=setup.device,
        )
        """float32 [2 Hkv]: memory, and names in a saved set."""
        self.reset()

    @property
    def values(self) -> Tensor:
        """See KVScales: a view of the parameter."""
        return self.parameter.data.view(2, -1)

    def reset(self) -> None:
        """Set all scales to 1."""
        self.parameter.data.fill_(1.0)

"""Which implementation of attention serves a device: probed once, reported by name. Knows no
step."""

from dataclasses import dataclass

import torch

from worker_daemon.errors import ConfigError
from worker_daemon.layers.attention import AttentionBackend
from worker_daemon.layers.torch_attention import TorchPagedAttention

MAX_HEAD_DIM = 256


@dataclass(frozen=True, slots=True)
class AttentionProvider:
    """An implementation, and the name under which a daemon reports it."""

    name: str
    backend: AttentionBackend


def probe_attention(device: torch.device, head_dim: int) -> AttentionProvider:
    """Return our Triton kernels on a CUDA device, plain torch elsewhere.

    Raises:
        ConfigError: no implementation has heads of this size.
    """
    if device.type != "cuda":
        return AttentionProvider("torch", TorchPagedAttention())
    if head_dim % 8 or head_dim > MAX_HEAD_DIM:
        raise ConfigError(
            "no attention kernel has heads of this size",
            field="head_dim",
            value=head_dim,
            fix=f"a multiple of 8, at most {MAX_HEAD_DIM}",
        )
    # Importing Triton takes longer than everything else that a CPU daemon imports of ours.
    from worker_daemon.kernels.backend import TritonAttention

    return AttentionProvider("triton", TritonAttention(device))

"""Which implementation of attention serves a device: probed once, reported by name. Knows no
step."""

from dataclasses import dataclass

import torch

from worker_daemon.layers.attention import AttentionBackend
from worker_daemon.layers.torch_attention import TorchPagedAttention


@dataclass(frozen=True, slots=True)
class AttentionProvider:
    """An implementation, and the name under which a daemon reports it."""

    name: str
    backend: AttentionBackend


def probe_attention(device: torch.device) -> AttentionProvider:
    """Return our Triton kernels on a CUDA device, plain torch elsewhere."""
    if device.type != "cuda":
        return AttentionProvider("torch", TorchPagedAttention())
    # Importing Triton takes longer than everything else that a CPU daemon imports of ours.
    from worker_daemon.kernels.backend import TritonAttention

    return AttentionProvider("triton", TritonAttention(device))

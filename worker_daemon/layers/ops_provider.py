"""Which implementation of the layer operations serves a device: probed once, reported by name.
Knows no step."""

from dataclasses import dataclass

import torch

from worker_daemon.layers.ops import LayerOps
from worker_daemon.layers.torch_ops import TorchOps


@dataclass(frozen=True, slots=True)
class LayerOpsProvider:
    """An implementation, and the name under which a daemon reports it."""

    name: str
    ops: LayerOps


def probe_layer_ops(device: torch.device) -> LayerOpsProvider:
    """Return our Triton kernels on a CUDA device, plain torch elsewhere."""
    if device.type != "cuda":
        return LayerOpsProvider("torch", TorchOps())
    # Importing Triton takes longer than everything else that a CPU daemon imports of ours.
    from worker_daemon.kernels.ops import TritonOps

    return LayerOpsProvider("triton", TritonOps(device))

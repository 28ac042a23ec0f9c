"""Which implementation of the layer operations serves a device: probed once. Knows no step."""

import torch

from worker_daemon.layers.ops import LayerOps
from worker_daemon.layers.torch_ops import TorchOps


def probe_layer_ops(device: torch.device) -> LayerOps:
    """Return our Triton kernels on a CUDA device, plain torch elsewhere."""
    if device.type != "cuda":
        return TorchOps()
    # Importing Triton takes longer than everything else that a CPU daemon imports of ours.
    from worker_daemon.kernels.ops import TritonOps

    return TritonOps(device)

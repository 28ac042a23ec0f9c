"""Which kernels serve a device: chosen once, when a rank gets its device or its model. Knows no
step."""

import torch

from worker_daemon.contracts.layer_ops import LayerOps
from worker_daemon.distributed.symmetric import Window
from worker_daemon.distributed.tp import MakeReducer, Reducer
from worker_daemon.layers.torch_ops import TorchOps


def layer_ops_for(device: torch.device) -> LayerOps:
    """Return our Triton kernels on a CUDA device, plain torch elsewhere."""
    if device.type != "cuda":
        return TorchOps()
    # Importing Triton takes longer than everything else that a CPU daemon imports of ours.
    from worker_daemon.kernels.ops import TritonOps

    return TritonOps(device)


def reducer_for(device: torch.device) -> MakeReducer | None:
    """Return what makes our Triton kernel's reducers of short messages over the windows of a
    tensor-parallel group on a CUDA device, nothing elsewhere."""
    return _peer_reduce if device.type == "cuda" else None


def _peer_reduce(window: Window) -> Reducer:
    # Importing Triton takes longer than everything else that a CPU daemon imports of ours.
    from worker_daemon.kernels.launch import has_dependent_launch
    from worker_daemon.kernels.peer_reduce import PeerReduce

    return PeerReduce(window, window.device, pdl=has_dependent_launch(window.device))

"""What reduces short messages over the windows of a tensor-parallel group: given to the group by
whoever makes it. Knows no link and no step."""

import torch

from worker_daemon.distributed.symmetric import Window
from worker_daemon.distributed.tp import MakeReducer, Reducer


def probe_reduction(device: torch.device) -> MakeReducer | None:
    """Return the maker of our Triton kernel's reducers on a CUDA device, nothing elsewhere."""
    if device.type != "cuda":
        return None
    return _peer_reduce


def _peer_reduce(window: Window) -> Reducer:
    # Importing Triton takes longer than everything else that a CPU daemon imports of ours.
    from worker_daemon.kernels.launch import has_dependent_launch
    from worker_daemon.kernels.peer_reduce import PeerReduce

    return PeerReduce(window, window.device, pdl=has_dependent_launch(window.device))

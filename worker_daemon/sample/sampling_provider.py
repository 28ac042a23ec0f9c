"""Which implementation of sampling serves a device: probed once. Knows no step."""

import torch

from worker_daemon.sample.sampler import Sampling, TorchSampling


def probe_sampling(device: torch.device) -> Sampling:
    """Return our Triton kernels on a CUDA device, plain torch elsewhere."""
    if device.type != "cuda":
        return TorchSampling()
    # Importing Triton takes longer than everything else that a CPU daemon imports of ours.
    from worker_daemon.kernels.sampling import TritonSampling

    return TritonSampling(device)

"""Rows of embeddings as tensors to upload."""

import torch

from worker_client.inputs.host_tensor import HostTensor
from worker_client.vllm.embedded_prompts import Places


def rows_of(embeds: torch.Tensor, places: Places, *, dtype: torch.dtype) -> HostTensor:
    """Return rows of embeddings [positions, hidden size] in another dtype; a copy, unless it is all
    rows in their own dtype. Raises ClientConfigError: they cannot be uploaded, as they are too
    many."""
    rows = embeds if len(places) == len(embeds) else embeds[torch.from_numpy(places)]
    rows = rows.detach().to("cpu", dtype).contiguous()
    data = rows.reshape(-1).view(torch.uint8).numpy().data
    return HostTensor.from_bytes(str(dtype).removeprefix("torch."), rows.shape, data)

"""Hand-made sampled rows, as the parts of a step receive them."""

import numpy as np
import torch

from worker_daemon.runner.sample_rows import SampleRows


def sample_rows(slots, positions=None, used=0):
    """Return rows with these slots on the CPU, without padding."""
    slots = np.asarray(slots, np.int64)
    positions = np.asarray(np.ones_like(slots) if positions is None else positions, np.int32)
    on_device = torch.from_numpy(slots.astype(np.int32))
    return SampleRows(
        slots_np=slots,
        generations=np.ones_like(slots),
        positions_np=positions,
        used=used,
        slots=on_device,
        token_indices=torch.zeros_like(on_device),
        positions=torch.from_numpy(positions.copy()),
        delivery=None,
    )

"""The sequences of a step that sample, on the host and on the device. Values alone."""

from typing import Final, NamedTuple

from torch import Tensor

from worker_daemon.device.pinned import upload
from worker_daemon.runner.scheduled_step import Int32s, Int64s
from worker_daemon.runner.staging import Delivery
from worker_daemon.runner.token_history import Sampled

BY_LOGITS: Final = 1
"""The bit of SampleRows.used that no part has: rows whose likeliest tokens are not known, as of a
step that failed."""


class SampleRows(NamedTuple):
    """The sequences of a step that sample. The device's columns may be longer: padding points at
    the spare row."""

    slots_np: Int64s
    """[R]"""
    generations: Int64s
    """[R] of the rows, when the step was accepted."""
    positions_np: Int32s
    """[R] position of the token that is sampled: an upper bound where `are_bounds`."""
    used: int
    """The bits of the parts that some row uses; 0: every row takes its likeliest token and reports
    nothing else."""
    slots: Tensor
    """int32 [>= R], device"""
    token_indices: Tensor
    """int32 [>= R], device: each sequence's last token in the step."""
    positions: Tensor
    """int32 [>= R], device"""
    delivery: Delivery | None
    """Where the host finds the likeliest tokens of all; None where they are copied to it."""
    are_bounds: bool = False
    """Some row's tokens may have been refused: the device alone has all positions."""

    @property
    def sampled(self) -> Sampled:
        """What the host is to remember of them."""
        return Sampled(self.slots_np, self.generations, self.positions_np, self.are_bounds)

    def clone(self) -> "SampleRows":
        """Return a copy whose columns no later step overwrites."""
        return self._replace(
            slots=self.slots.clone(),
            token_indices=self.token_indices.clone(),
            positions=self.positions.clone(),
            delivery=None,
        )

    def keep(self, chosen: Int64s) -> "SampleRows":
        """Return these rows only. chosen [R'] int64: indices into the rows."""
        on_device = upload(chosen, self.slots.device)
        return SampleRows(
            self.slots_np[chosen],
            self.generations[chosen],
            self.positions_np[chosen],
            self.used,
            self.slots[on_device],
            self.token_indices[on_device],
            self.positions[on_device],
            None,
            self.are_bounds,
        )

    def without_padding(self) -> "SampleRows":
        """Return the same rows, whose columns on the device are [R]."""
        count = self.slots_np.size
        return self._replace(
            slots=self.slots[:count],
            token_indices=self.token_indices[:count],
            positions=self.positions[:count],
        )

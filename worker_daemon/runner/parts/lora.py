"""LoRA adapters of requests: copies those of a step to device slots, and gives the linear layers
each token's slot.

Shapes: S rows, N tokens.
"""

from collections.abc import Sequence
from typing import Final, TypeAlias

import numpy as np
from torch import Tensor

from rpc_schema.extensions import extension_of
from rpc_schema.lora_request import LoraRequest
from rpc_schema.step import NewRequestData
from worker_daemon.contracts.arrays import Int32s, Int64s
from worker_daemon.lora.host_store import HostAdapter
from worker_daemon.runner.parts.interface import PartContext, StepPart
from worker_daemon.runner.scheduled_step import ScheduledStep, invalid

_NONE: Final = 0
_MISSING: Final = -1
_ZEROS: Final = 0
"""Version that stands for an adapter of zeros."""

_Wanted: TypeAlias = tuple[int, int]
"""An adapter's id and version."""
_NO_ADAPTER: Final[_Wanted] = (0, 0)


class LoraPart(StepPart):
    """Gives each row its adapter. If this rank lacks a row's adapter, the row's hidden states
    become NaN. So the step continues, even if only some ranks lack the adapter."""

    request_extension = LoraRequest
    heaviest = LoraRequest(name="warm-up", lora_id=1, version=_ZEROS)
    columns = ("token",)
    in_forward = True
    in_sampling = False
    checks_batches = True

    @classmethod
    def serves(cls, context: PartContext) -> bool:
        return context.adapters is not None

    def __init__(self, context: PartContext) -> None:
        assert context.adapters is not None, "see serves"
        self._adapters = context.adapters
        self._wanted: list[_Wanted] = [_NO_ADAPTER] * context.num_rows
        """[S] the adapters that the rows want; the same on all ranks."""
        self._serials = np.zeros(context.num_rows, np.int64)
        """[S] the serial (HostAdapter.serial) of each row's adapter on this rank; _NONE if the row
        has no adapter, _MISSING if this rank lacks it."""
        self._used: dict[int, HostAdapter] = {}
        """The adapters by serial."""

    def check_batch(self, slots: Int64s, new: Sequence[NewRequestData]) -> None:
        by_slot = {slot: self._wanted[slot] for slot in slots.tolist()}
        by_slot |= {request.slot: _wanted(request) for request in new if request.slot in by_slot}
        different = set(by_slot.values()) - {_NO_ADAPTER}
        most = self._adapters.layout.max_slots
        if len(different) > most:
            fix = f"schedule requests of at most {most} adapters (max_loras) in a step"
            raise invalid("scheduled", f"requests of {len(different)} adapters", fix)

    def admit(
        self, requests: Sequence[NewRequestData], extensions: Sequence[LoraRequest | None]
    ) -> None:
        for request, wanted in zip(requests, extensions, strict=True):
            self._wanted[request.slot] = _wanted(request)
            self._serials[request.slot] = _NONE if wanted is None else self._find(wanted)
        # Adapters that no row uses any more need not stay in host memory.
        named = set(self._serials.tolist())
        for serial in [serial for serial in self._used if serial not in named]:
            del self._used[serial]

    def _find(self, wanted: LoraRequest) -> int:
        if wanted.version == _ZEROS:
            return _NONE
        adapter = self._adapters.store.find(wanted.lora_id, wanted.version)
        if adapter is None:
            return _MISSING
        self._used[adapter.serial] = adapter
        return adapter.serial

    def fill(self, columns: Sequence[Int32s], step: ScheduledStep, step_values: None) -> None:
        serials, which = np.unique(self._serials[step.slots], return_inverse=True)
        adapters = [self._used[serial] for serial in serials.tolist() if serial > _NONE]
        placed = iter(self._adapters.slots.place(adapters))
        places = [next(placed) + 1 if serial > _NONE else serial for serial in serials.tolist()]
        by_row = np.array(places, np.int32)[which]
        columns[0][: step.total_num_tokens] = np.repeat(by_row, step.num_tokens)

    def before_forward(self, hidden: Tensor, columns: Sequence[Tensor]) -> Tensor:
        self._adapters.layout.token_slots = columns[0]
        return hidden

    def forward_ended(self) -> None:
        self._adapters.layout.token_slots = None


def _wanted(request: NewRequestData) -> _Wanted:
    extension = extension_of(request.extensions, LoraRequest)
    if extension is None or extension.version == _ZEROS:
        return _NO_ADAPTER
    return extension.lora_id, extension.version

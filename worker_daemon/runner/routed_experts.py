"""The experts of tokens: collected over the stages of a step, and kept with the KV of all tokens on
the last one.

A stage sends its choices behind its hidden states: a row of the message is [H] values of the
model's dtype, then the numbers of the experts of all layers so far, with their bytes as values of
that dtype. So the exchanges between ranks stay the same.

Shapes: N tokens of a step with padding, H hidden size, E numbers of a token over all layers with
experts so far, T tokens, S request rows.
"""

from collections.abc import Sequence
from typing import Final, NamedTuple

import torch
from torch import Tensor

from rpc_schema.routed_experts import RoutedExpertsShape
from worker_daemon.layers.routed_experts import ChosenExperts
from worker_daemon.runner.kv_cache import routed_dtype

_ALIGNMENT: Final = 16
"""Rows of a message stay multiples of as many bytes."""


class KeptExperts:
    """The experts of the last step's tokens, and of all tokens with KV. Owned by the runner of a
    rank of the last stage, on the step thread; graphs write to its memory."""

    def __init__(
        self,
        shape: RoutedExpertsShape,
        pages: Tensor | None,
        block_table: Tensor,
        max_num_tokens: int,
    ) -> None:
        """pages: [num_blocks, block_size, E], None without a KV cache; block_table: int32 [S + 1,
        max_blocks]: both of the first KV group. max_num_tokens: of a step, with padding."""
        self.shape = shape
        self.device = block_table.device
        width, device = shape.num_layers * shape.top_k, block_table.device
        self._block_table = block_table
        self._block_size = 1 if pages is None else pages.shape[1]
        self._pages = None if pages is None else pages.view(-1, width)
        self._step = torch.zeros((max_num_tokens, width), dtype=routed_dtype(shape), device=device)
        self._positions = torch.zeros(max_num_tokens, dtype=torch.int32, device=device)

    def store(self, experts: Tensor, positions: Tensor, slot_mapping: Tensor) -> None:
        """Keep the experts [N, E] of a step's tokens: positions int32 [N], slot_mapping int64 [N]
        of the first KV group. Padding goes to the null block."""
        count = experts.shape[0]
        step = self._step[:count]
        step.copy_(experts)
        self._positions[:count].copy_(positions)
        if self._pages is not None:
            self._pages.index_copy_(0, slot_mapping, step)

    def of_step(self, tokens: Tensor | None, count: int) -> Tensor:
        """Return a copy of the experts of some of the step's tokens, [T, E]. tokens: their indices,
        int64 [T]; None: the first `count`."""
        return self._step[:count].clone() if tokens is None else self._step.index_select(0, tokens)

    def positions(self, tokens: Tensor) -> Tensor:
        """Return the positions of some of the step's tokens, int32 [T], as the device has corrected
        them. tokens: int64 [T]."""
        return self._positions.index_select(0, tokens)

    def of_cached(self, rows: Tensor, positions: Tensor) -> Tensor:
        """Return the experts of tokens with KV, [T, E]: rows and positions, int64 [T]."""
        assert self._pages is not None, "a step with requests has a KV cache"
        blocks = self._block_table[rows, positions // self._block_size].long()
        slots = blocks * self._block_size + positions % self._block_size
        return self._pages.index_select(0, slots)


class StageRouting(NamedTuple):
    """Sizes of the experts that a stage hands on or keeps."""

    shape: RoutedExpertsShape
    num_before: int
    """Layers with experts on earlier stages."""
    num_here: int
    pages: Tensor | None
    """See KeptExperts; None on stages but the last too."""

    def width_in(self, dtype: torch.dtype) -> int:
        """Return the values of `dtype` that a row of a received message has behind the hidden
        state."""
        return self._width(self.num_before, dtype)

    def width_out(self, dtype: torch.dtype) -> int:
        """Return the same for the message that is sent."""
        return self._width(self.num_before + self.num_here, dtype)

    def _width(self, num_layers: int, dtype: torch.dtype) -> int:
        num_bytes = num_layers * self.shape.top_k * routed_dtype(self.shape).itemsize
        return -(-num_bytes // _ALIGNMENT) * _ALIGNMENT // dtype.itemsize


class ReplayTarget(NamedTuple):
    """A stage's layers with experts, which take the experts that requests bring."""

    chosen: ChosenExperts
    layers: slice
    """Those of this stage, among all with experts."""


class StageExperts:
    """Joins the choices of a stage's routers to those of earlier stages. Graphs may hold its
    launches."""

    def __init__(
        self,
        routing: StageRouting,
        chosen: ChosenExperts,
        hidden_size: int,
        kept: KeptExperts | None,
    ) -> None:
        """kept: None on stages but the last."""
        self._chosen = chosen
        self._hidden_size = hidden_size
        self._kept = kept
        self._dtype = routed_dtype(routing.shape)
        self._routing = routing
        self._num_before = routing.num_before * routing.shape.top_k

    def split(self, arrived: Tensor) -> tuple[Tensor, Tensor]:
        """Return the hidden states [N, H] of a received message [N, H + width_in], and the experts
        of earlier stages' layers [N, E]."""
        size = self._hidden_size
        return arrived[:, :size].contiguous(), self._numbers(arrived, self._num_before)

    def end(
        self, hidden: Tensor, earlier: Tensor | None, positions: Tensor, slot_mapping: Tensor
    ) -> Tensor:
        """End the forward pass of a step. hidden [N, H]: the stage's output; earlier: see split,
        None on the first stage; positions, slot_mapping: see KeptExperts.store. Return hidden on
        the last stage, otherwise the message for the next one, [N, H + width_out]."""
        chosen = self._chosen.take()
        if self._kept is not None:
            experts = _joined(chosen, earlier)
            if experts is not None:
                self._kept.store(experts, positions, slot_mapping)
            return hidden
        size = self._hidden_size
        width = size + self._routing.width_out(hidden.dtype)
        message = hidden.new_zeros((hidden.shape[0], width))
        message[:, :size] = hidden
        experts = _joined(chosen, earlier)
        if experts is not None:
            self._numbers(message, experts.shape[1]).copy_(experts)
        return message

    def _numbers(self, message: Tensor, count: int) -> Tensor:
        """Return a view of the first `count` numbers behind the hidden states."""
        raw = message[:, self._hidden_size :].view(torch.uint8)
        return raw[:, : count * self._dtype.itemsize].view(self._dtype)


def _joined(chosen: Sequence[Tensor], earlier: Tensor | None) -> Tensor | None:
    """Return the numbers of all layers so far, [N, E]; None if there are none."""
    parts = [*([] if earlier is None else [earlier]), *chosen]
    if not parts:
        return None
    return parts[0] if len(parts) == 1 else torch.cat(parts, dim=1)

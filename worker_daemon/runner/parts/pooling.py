"""Pooling: outputs computed from a prompt's hidden states. The request ends with them.

Shapes: N tokens of a step, H hidden size, S rows, R rows with equal parameters, W values of an
output.
"""

from collections import defaultdict
from collections.abc import Mapping, Sequence
from typing import Final, NamedTuple

import numpy as np
import torch
from msgspec import structs
from torch import Tensor

from rpc_schema.pooling import (
    PooledOutputs,
    PooledStates,
    PoolingParams,
    admission_fault,
    pooled_bytes,
    sampling_kind,
)
from rpc_schema.step import NewRequestData
from worker_daemon.contracts.arrays import Bools, Int32s, Int64s
from worker_daemon.device.pinned import download, upload
from worker_daemon.models.pooler import Pooler
from worker_daemon.runner.parts.interface import PartContext, Report, StepPart
from worker_daemon.runner.scheduled_step import OutputSize, ScheduledStep, StepLimits, invalid

_NONE: Final = 1 << 62
"""A position behind all prompts."""


class _PooledRows(NamedTuple):
    """Rows of a step whose requests have the same extension. Host memory, [R] each."""

    slots: Int64s
    firsts: Int64s
    """Index of each row's first token in the step."""
    num_tokens: Int64s
    """Tokens in the step."""
    starts: Int32s
    """Position of the first of these tokens."""
    ends: Int32s
    """Length of the prompt so far."""
    is_last: Bools
    """True if the prompt is complete."""

    def take(self, chosen: Sequence[int] | Int64s) -> "_PooledRows":
        """Return the rows with these indices."""
        return _PooledRows(
            self.slots[chosen],
            self.firsts[chosen],
            self.num_tokens[chosen],
            self.starts[chosen],
            self.ends[chosen],
            self.is_last[chosen],
        )


class _Outputs(NamedTuple):
    """Outputs of some rows."""

    slots: Int64s
    """[R]"""
    sizes: Int64s
    """[R, 2]: the shape of each request's output, [1 or its number of tokens, W]."""
    pieces: tuple[Tensor, ...]
    """float32 [n, W]: the outputs of the requests, one after the other."""


def _tokens_of(rows: _PooledRows, hidden: Tensor) -> Tensor:
    """Return the hidden states of the rows' tokens, [n, H]."""
    first, num = int(rows.firsts[0]), int(rows.num_tokens.sum())
    if int(rows.firsts[-1] + rows.num_tokens[-1]) - first == num:  # no other row is between them
        return hidden[first : first + num]
    places = np.repeat(rows.firsts, rows.num_tokens)
    places += np.arange(num) - np.repeat(
        np.cumsum(rows.num_tokens) - rows.num_tokens, rows.num_tokens
    )
    return hidden.index_select(0, upload(places, hidden.device))


class PoolingPart(StepPart):
    """Pools on the last stage, and gives tokens their types on an encoder's first one.

    Between the chunks of a prompt it keeps the sum of hidden states or per-token outputs. The next
    step that pools drops the per-token outputs of aborted requests.
    """

    request_extension = PoolingParams
    in_forward = True
    has_graphs = False  # encoders have none
    pools = True

    def __init__(self, context: PartContext) -> None:
        num_rows = context.num_rows
        self._pooler = context.pooler
        self._encoder = context.encoder
        self._device = context.device
        self._typed: Tensor | None = None
        """int64 [E]: the current step's tokens of type 1."""
        self._seconds = np.full(num_rows, _NONE, np.int64)
        """[S] the position of each prompt's first token of type 1."""
        self._support = context.limits.pooling
        self._params: list[PoolingParams | None] = [None] * num_rows
        self._num_tokens = np.zeros(num_rows, np.int32)
        """[S] tokens of the prompts."""
        self._kept: dict[int, list[Tensor]] = {}
        """By slot, the outputs float32 [n, W] of each chunk so far: page-locked host memory that
        the device may still be writing."""
        self._sums: Tensor | None = None
        """float32 [S, H]: sums of hidden states, if the model pools means."""
        if self._pooler is not None and any(t.states == "mean" for t in self._support.tasks):
            shape = (num_rows, self._pooler.hidden_size)
            self._sums = torch.zeros(shape, dtype=torch.float32, device=context.device)

    def check(self, extension: PoolingParams, request: NewRequestData, limits: StepLimits) -> None:
        name = f"scheduled_new_reqs[{request.req_id}]"
        kind = sampling_kind(request.extensions)
        if kind is not None:
            raise invalid(f"{name}.extensions", kind, "leave it out: PoolingParams sample nothing")
        fault = admission_fault(
            extension,
            request.num_tokens,
            request.num_computed_tokens,
            limits.pooling,
            limits.max_num_batched_tokens,
        )
        if fault is not None:
            field, value, fix = fault
            raise invalid(f"{name}.{field}", value, fix)

    def uses(self, extension: PoolingParams) -> bool:
        """Return False: the part does nothing when rows are sampled."""
        return False

    def uses_step(self, step: ScheduledStep) -> bool:
        return self._support.token_types and bool((self._seconds[step.slots] < step.ends).any())

    def fill(self, columns: Sequence[Int32s], step: ScheduledStep, step_values: None) -> None:
        if self._encoder is None:
            return
        counts = step.num_tokens.astype(np.int64)
        firsts = np.cumsum(counts) - counts
        positions = np.arange(counts.sum()) - np.repeat(firsts - step.starts, counts)
        is_second = positions >= np.repeat(self._seconds[step.slots], counts)
        self._typed = upload(np.flatnonzero(is_second), self._device)

    def before_forward(self, hidden: Tensor, columns: Sequence[Tensor]) -> Tensor:
        typed, self._typed = self._typed, None
        if self._encoder is None or typed is None:
            return hidden
        return self._encoder.add_second_type(hidden, typed)  # this step's own embeddings

    def admit(
        self, requests: Sequence[NewRequestData], extensions: Sequence[PoolingParams | None]
    ) -> None:
        for request, params in zip(requests, extensions, strict=True):
            second = None if params is None else params.second_start
            self._seconds[request.slot] = _NONE if second is None else second
            # Rows are pooled together, whatever their types.
            plain = None if params is None else structs.replace(params, second_start=None)
            self._params[request.slot] = plain
            self._num_tokens[request.slot] = request.num_tokens
            self._kept.pop(request.slot, None)

    def output_size(
        self, extension: PoolingParams, num_tokens: int, limits: StepLimits
    ) -> OutputSize:
        total = pooled_bytes(extension, num_tokens, limits.pooling)
        is_each = self._states(extension) == "each"
        return OutputSize(total, total // num_tokens if is_each else 0)

    @torch.inference_mode()
    def pool(self, hidden: Tensor, step: ScheduledStep) -> Report | None:
        assert step.pooling is not None, "a row of the step pools"
        # step.pooling has the slots of all live pooling requests, even without tokens in this step.
        for slot in self._kept.keys() - set(step.pooling.tolist()):
            del self._kept[slot]
        outputs: list[_Outputs] = []
        for params, rows in self._by_params(step).items():
            outputs += self._pool(params, rows, hidden)
        if not outputs:
            return None
        extension = PooledOutputs(
            slots=np.concatenate([each.slots for each in outputs]).astype("<u2").tobytes(),
            sizes=np.concatenate([each.sizes for each in outputs]).astype("<i4").tobytes(),
        )
        columns = tuple(piece for each in outputs for piece in each.pieces)
        return Report(extension, columns, per_row=False, is_one_frame=True)

    def _by_params(self, step: ScheduledStep) -> Mapping[PoolingParams, _PooledRows]:
        """Return the step's rows that pool, by the extension of their requests."""
        num_tokens = step.num_tokens.astype(np.int64)
        of_step = _PooledRows(
            step.slots,
            np.cumsum(num_tokens) - num_tokens,
            num_tokens,
            step.starts,
            step.ends,
            step.ends == self._num_tokens[step.slots],
        )
        indices: defaultdict[PoolingParams, list[int]] = defaultdict(list)
        for index, slot in enumerate(step.slots.tolist()):
            params = self._params[slot]
            if params is not None:
                indices[params].append(index)
        return {params: of_step.take(chosen) for params, chosen in indices.items()}

    def _pool(self, params: PoolingParams, rows: _PooledRows, hidden: Tensor) -> "list[_Outputs]":
        """Return the outputs of the rows whose prompt is complete."""
        states = self._states(params)
        if states == "each":
            return self._pool_each(params, rows, hidden)
        sums = self._add_up(rows, hidden) if states == "mean" else None
        is_last = np.flatnonzero(rows.is_last)
        if not is_last.size:
            return []
        if sums is not None:
            pooled = sums[upload(is_last, hidden.device)]
            rows = rows.take(is_last)
            pooled /= upload(rows.ends, hidden.device).unsqueeze(1)
        else:
            rows = rows.take(is_last)
            places = rows.firsts if states == "first" else rows.firsts + rows.num_tokens - 1
            pooled = self._of_stage.states(hidden.index_select(0, upload(places, hidden.device)))
        values = self._finish(params, pooled)
        sizes = np.full((rows.slots.size, 2), (1, values.shape[1]))
        return [_Outputs(rows.slots, sizes, (values,))]

    def _pool_each(
        self, params: PoolingParams, rows: _PooledRows, hidden: Tensor
    ) -> "list[_Outputs]":
        values = self._finish(params, self._of_stage.states(_tokens_of(rows, hidden)))
        done = []
        for slot, chunk, is_last in zip(
            rows.slots.tolist(),
            torch.split(values, rows.num_tokens.tolist()),
            rows.is_last.tolist(),
            strict=True,
        ):
            if not is_last:
                self._kept.setdefault(slot, []).append(download(chunk))
                continue
            pieces = (*self._kept.pop(slot, ()), chunk)
            size = (sum(piece.shape[0] for piece in pieces), chunk.shape[1])
            done.append(_Outputs(np.array([slot]), np.array([size]), pieces))
        return done

    def _add_up(self, rows: _PooledRows, hidden: Tensor) -> Tensor:
        """Return the sums float32 [R, H] of the rows' hidden states since their first token."""
        assert self._sums is not None, "the model pools means"
        states = self._of_stage.states(_tokens_of(rows, hidden)).float()
        lengths, slots, goes_on = (
            upload(column, hidden.device)
            for column in (rows.num_tokens, rows.slots, rows.starts > 0)
        )
        sums = torch.segment_reduce(states, "sum", lengths=lengths, unsafe=True)
        sums += torch.where(goes_on.unsqueeze(1), self._sums[slots], 0.0)
        self._sums[slots] = sums
        return sums

    def _finish(self, params: PoolingParams, states: Tensor) -> Tensor:
        """states [n, H] -> float32 [n, W]."""
        if params.task in ("embed", "token_embed"):
            return self._of_stage.embed(states, params.dimensions, params.use_activation)
        return self._of_stage.classify(states, params.use_activation)

    @property
    def _of_stage(self) -> Pooler:
        assert self._pooler is not None, "the last stage pools"
        return self._pooler

    def _states(self, params: PoolingParams) -> PooledStates:
        found = self._support.find(params.task)
        assert found is not None, "the task was checked"
        return found.states

"""Prompt embeddings: on the first stage, uploaded rows replace the embeddings of the placeholder
tokens at some positions of a prompt. Only steps with such positions use the part.

The uploads stay in host memory, and a step copies the rows that it needs. So the feature holds no
device memory between steps. Within a step its rows take no more than the hidden states do, and only
until the layers run.

Shapes: S rows, N tokens, H hidden size, E embedded tokens of a step.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from rpc_schema.errors import StateError
from rpc_schema.prompt_embeds import PromptEmbeds, embeds_fault
from rpc_schema.step import NewRequestData
from worker_daemon.contracts.arrays import Int32s, Int64s
from worker_daemon.contracts.uploads import UploadedTensor
from worker_daemon.device.pinned import upload
from worker_daemon.runner.parts.interface import PartContext, StepPart
from worker_daemon.runner.scheduled_step import ScheduledStep, StepLimits, invalid

_DTYPES = {"float32": torch.float32, "float16": torch.float16, "bfloat16": torch.bfloat16}


@dataclass(frozen=True, slots=True)
class _Embedded:
    """A request with embeddings, and their positions."""

    req_id: str
    embeds: PromptEmbeds
    source: Int32s
    """[end of the last range] the row of the upload for each prompt position; -1 where the position
    has an ordinary token."""

    def of(self, start: int, count: int) -> Int32s:
        """Return the entries of `count` positions from start on; fewer where source ends."""
        return self.source[start : start + count]


class PromptEmbedsPart(StepPart):
    """Replaces hidden states before the first layer. Runs without graphs: a second set of prefill
    graphs would double their memory and their capture time."""

    request_extension = PromptEmbeds
    in_forward = True
    has_graphs = False

    def __init__(self, context: PartContext) -> None:
        self._context = context
        self._rows: list[_Embedded | None] = [None] * context.num_rows
        self._ends = np.zeros(context.num_rows, np.int32)
        """[S] the position after the last embedded one."""
        self._taken: tuple[Tensor, Tensor] | None = None
        """The current step's embedded tokens: their indices, int64 [E], and their rows, [E, H]."""

    def check(self, extension: PromptEmbeds, request: NewRequestData, limits: StepLimits) -> None:
        fault = embeds_fault(extension, limits.hidden_size, request.num_prompt_tokens)
        if fault is not None:
            field = f"scheduled_new_reqs[{request.req_id}].prompt_embeds.{fault.field}"
            raise invalid(field, fault.value, fault.fix)

    def uses(self, extension: PromptEmbeds) -> bool:
        return False  # uses_step tells in which steps

    def admit(
        self, requests: Sequence[NewRequestData], extensions: Sequence[PromptEmbeds | None]
    ) -> None:
        for request, embeds in zip(requests, extensions, strict=True):
            row = None
            if embeds is not None:
                row = _Embedded(request.req_id, embeds, _source(embeds))
            self._rows[request.slot] = row
            self._ends[request.slot] = 0 if row is None else row.source.size

    def uses_step(self, step: ScheduledStep) -> bool:
        return any((row.of(start, count) >= 0).any() for row, start, count, _ in self._among(step))

    def fill(self, columns: Sequence[Int32s], step: ScheduledStep, step_values: None) -> None:
        """Raises StateError if an upload is missing, or is not the tensor that the request says."""
        self._taken = None
        if not self._context.is_first_stage:
            return
        found: list[tuple[UploadedTensor, Int64s]] = []
        places = []
        for row, start, count, first in self._among(step):
            source = row.of(start, count)
            tokens = np.flatnonzero(source >= 0)
            if tokens.size:
                found.append((self._find(row), source[tokens].astype(np.int64)))
                places.append(first + tokens)
        self._taken = (upload(np.concatenate(places), self._context.device), self._gather(found))

    def before_forward(self, hidden: Tensor, columns: Sequence[Tensor]) -> Tensor:
        if self._taken is None:
            return hidden
        (places, rows), self._taken = self._taken, None
        # In place: on the first stage hidden is the embedding's result, which is this step's own.
        return hidden.index_copy_(0, places, rows)

    def _among(self, step: ScheduledStep) -> list[tuple[_Embedded, int, int, int]]:
        """Return, for each sequence that may have embedded tokens in the step: its row, its first
        position, its number of tokens, and the index of the first token in the step."""
        (indices,) = np.nonzero(step.starts < self._ends[step.slots])
        firsts = np.cumsum(step.num_tokens) - step.num_tokens
        among = []
        for index in indices.tolist():
            row = self._rows[int(step.slots[index])]
            if row is not None:
                start, count = int(step.starts[index]), int(step.num_tokens[index])
                among.append((row, start, count, int(firsts[index])))
        return among

    def _find(self, row: _Embedded) -> UploadedTensor:
        embeds = row.embeds
        found = self._context.find_upload(embeds.content_hash)
        shape = (embeds.num_rows, embeds.width)
        if found is not None and (found.dtype, found.array.shape) == (embeds.dtype, shape):
            return found
        there = "there is none" if found is None else f"{found.dtype} {list(found.array.shape)}"
        raise StateError(
            f"request {row.req_id} needs an upload of {embeds.dtype} {list(shape)}: {there}",
            field="prompt_embeds.content_hash",
            value=embeds.content_hash.hex(),
            fix="upload it to every rank of the first stage before the request is admitted, and "
            "keep it there until the request ends",
        )

    def _gather(self, found: Sequence[tuple[UploadedTensor, Int64s]]) -> Tensor:
        """Return the rows [E, H] of uploads on the device, in the model's dtype."""
        context = self._context
        shape = (sum(rows.size for _, rows in found), context.limits.hidden_size)
        locked = context.device.type == "cuda"
        host = torch.empty(shape, dtype=context.dtype, pin_memory=locked)
        first = 0
        for tensor, rows in found:
            _copy_rows(tensor, rows, host[first : first + rows.size])
            first += rows.size
        return host.to(context.device, non_blocking=True)


def _source(embeds: PromptEmbeds) -> Int32s:
    last = embeds.ranges[-1]
    source = np.full(last.start + last.length, -1, np.int32)
    first = 0
    for each in embeds.ranges:
        source[each.start : each.start + each.length] = np.arange(first, first + each.length)
        first += each.length
    return source


def _copy_rows(tensor: UploadedTensor, rows: Int64s, target: Tensor) -> None:
    """Copy rows of an upload into target [rows, H], host memory of the model's dtype."""
    dtype = _DTYPES[tensor.dtype]
    copied = target if dtype == target.dtype else torch.empty_like(target, dtype=dtype)
    raw = copied.view(torch.uint16) if dtype == torch.bfloat16 else copied
    np.take(tensor.array, rows, axis=0, out=raw.numpy(), mode="clip")  # unbuffered, unlike "raise"
    if copied is not target:
        target.copy_(copied)

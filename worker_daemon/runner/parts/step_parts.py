"""Holds a runner's parts: maps extensions to parts, tracks which rows use which, and calls each
part at its point in the step.

Each part has a bit; an integer of such bits names the parts that a row, a step or a graph uses.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from rpc_schema.base import Extension
from rpc_schema.codec import Frame
from rpc_schema.extensions import RequestExtension, StepExtension, extension_of
from rpc_schema.step import NO_TOKEN, NewRequestData
from worker_daemon.contracts.arrays import Int32s, Int64s
from worker_daemon.drafting.interface import Gained
from worker_daemon.runner.parts.interface import (
    Chosen,
    PartContext,
    Per,
    PositionLogits,
    Report,
    StepPart,
    TokenChooser,
)
from worker_daemon.runner.parts.moved_blocks import check_unique
from worker_daemon.runner.sample_rows import BY_LOGITS, SampleRows
from worker_daemon.runner.scheduled_step import (
    NO_STEP_VALUES,
    OutputSize,
    ScheduledStep,
    StepExtensions,
    StepLimits,
    invalid,
)
from worker_daemon.runner.step_layout import StepColumns, StepPlan, StepShape


@dataclass(frozen=True, slots=True)
class SamplerOutput:
    """Device tensors; nothing has been waited for."""

    token_ids: Tensor
    """int64 [R]; NO_TOKEN in rows whose logits are NaN or infinite."""
    reports: tuple[Report, ...] = ()
    refused: Tensor | None = None
    """int32 [Q], the number of samples that a row does not gain although the step counted them, the
    last ones; None if no row has drafts, or uses a part that may refuse."""
    gained: Gained | None = None
    """Tokens that rows gain in a step with drafts."""
    total: Tensor | None = None
    """int32 [Q], each row's refusals so far. Set by the StepSampler, with `refused`: the rows' own
    tables then have it, and the tokens from which they continue."""


class _Member(NamedTuple):
    bit: int
    part: StepPart


class StepParts:
    """The parts of one runner. Owned by the model runner, used on the step thread only."""

    def __init__(
        self, parts: Sequence[StepPart], chooser: TokenChooser, context: PartContext
    ) -> None:
        """parts: in the order in which they act, including the chooser if it is a part."""
        num_rows = context.num_rows
        self._members = [
            _Member(BY_LOGITS << (index + 1), part) for index, part in enumerate(parts)
        ]
        self._of_request = {
            kind: m for m in self._members if (kind := m.part.request_extension) is not None
        }
        self._of_step = {
            of_step: m for m in self._members if (of_step := m.part.step_extension) is not None
        }
        self.chooser = chooser
        self._has = np.zeros(num_rows, np.int64)
        """Bits of the parts for which the row's request has an extension."""
        self._uses = np.zeros(num_rows, np.int64)
        """Bits of the parts in _has that all steps of the request use."""
        self.refusing = sum(m.bit for m in self._members if m.part.may_refuse)
        """Bits of the parts that may refuse tokens."""
        self._pooling = [m for m in self._members if m.part.pools]
        self._reporting = sum(
            m.bit for m in self._members if type(m.part).report is not StepPart.report
        )
        self._reporting_forward = sum(m.bit for m in self._members if m.part.reports_forward)
        self.has_reports_of_forward = False
        """True if a row may have a report of the forward pass."""
        self._following = sum(m.bit for m in self._members if m.part.follows_tokens)
        in_forward = sum(m.bit for m in self._members if m.part.in_forward)
        self.in_forward = in_forward | self.refusing
        """Bits of the parts that act around the forward pass, including those that may refuse
        tokens, because counts are corrected before it."""
        self.active_in_forward = 0
        """Bits in in_forward of the parts for which some row's request has an extension. A row
        keeps the bits of a request that has ended until its slot is reused."""
        self.in_sampling = sum(m.bit for m in self._members if m.part.in_sampling)
        """Bits of the parts that act when tokens are sampled."""
        self._checking = tuple(m.part for m in self._members if m.part.checks_batches)
        heaviest = (m.part.heaviest for m in self._members)
        self.heaviest = tuple(extension for extension in heaviest if extension is not None)
        """Extensions of a request that uses every part."""

    # Validation.

    def check(self, request: NewRequestData, limits: StepLimits) -> None:
        """Check a new request's extensions. Pure; raises InvalidStepError."""
        if request.extensions:
            _check_unique(f"scheduled_new_reqs[{request.req_id}].extensions", request.extensions)
        for extension in request.extensions:
            member = self._of_request.get(type(extension))
            if member is None:
                field, kind = f"scheduled_new_reqs[{request.req_id}]", type(extension).__name__
                raise invalid(f"{field}.extensions", kind, "load the model with that feature")
            member.part.check(extension, request, limits)

    def check_batch(self, slots: Int64s, new: Sequence[NewRequestData]) -> None:
        """Check the rows of a step together. Pure; raises InvalidStepError."""
        for part in self._checking:
            part.check_batch(slots, new)

    def may_refuse(self, extensions: Sequence[RequestExtension]) -> bool:
        """Return True if tokens of the request may be refused. Its extensions have been checked."""
        members = ((self._of_request[type(each)].part, each) for each in extensions)
        return any(part.may_refuse and part.uses(each) for part, each in members)

    def output_size(self, request: NewRequestData, limits: StepLimits) -> OutputSize | None:
        """Return the size of a new request's output if it pools; None if it samples. Its extensions
        were checked."""
        for extension in request.extensions:
            part = self._of_request[type(extension)].part
            if part.pools:
                return part.output_size(extension, request.num_tokens, limits)
        return None

    def check_step(
        self, extensions: Sequence[StepExtension], frames: Sequence[Frame], limits: StepLimits
    ) -> StepExtensions:
        """Check a step's extensions with their frames. Pure; raises InvalidStepError."""
        expected = sum(extension.num_frames for extension in extensions)
        if len(frames) != expected:
            fix = f"send {expected} for the extensions, besides any frame of new requests' tokens"
            raise invalid("arrays", f"{len(frames)} frames besides the step's own", fix)
        if not extensions:
            return NO_STEP_VALUES
        _check_unique("extensions", extensions)
        data: list[tuple[int, Any]] = []
        loaded: list[Int32s] = []
        first = 0
        for extension in extensions:
            member = self._of_step.get(type(extension))
            if member is None:
                fix = "load the model with that feature"
                raise invalid("extensions", type(extension).__name__, fix)
            bit, part = member
            own = frames[first : first + extension.num_frames]
            value = part.check_step(extension, own, limits)
            data.append((bit, value))
            if part.loads_blocks:
                loaded.append(part.loaded_blocks(value))
            first += extension.num_frames
        if len(loaded) > 1:
            check_unique("load_blocks", np.concatenate(loaded))
        used = sum(bit for bit, _ in data) & (self.in_sampling | self.in_forward)
        return StepExtensions(used, tuple(data))

    def check_later(
        self, extensions: Sequence[StepExtension], frames: Sequence[Frame], limits: StepLimits
    ) -> StepExtensions:
        """Check the extensions of a SampleTokens, as check_step does those of a step."""
        for extension in extensions:
            member = self._of_step.get(type(extension))
            if member is not None and not member.part.may_come_later:
                fix = "send it with the step"
                raise invalid("extensions", type(extension).__name__, fix)
        return self.check_step(extensions, frames, limits)

    def step_value(self, kind: type[StepExtension], values: StepExtensions) -> Any | None:
        """Return what check_step has made of a step's extension of a kind; None if it has none."""
        member = self._of_step.get(kind)
        return None if member is None else values.of(member.bit)

    def check_drafts(self, step_values: StepExtensions, slots: Int64s, drafts: Int32s) -> None:
        """Check a message's values against the drafts [B] of the slots [B] that it samples. Pure;
        raises InvalidStepError."""
        for own, value in step_values.data:
            for bit, part in self._of_step.values():
                if bit == own:
                    part.check_drafts(value, slots, drafts)

    # Rows.

    def admit(
        self, requests: Sequence[NewRequestData], tokens: Sequence[Int32s] | None = None
    ) -> None:
        """Start requests in their slots, each with its tokens; None if no part follows tokens."""
        slots = np.fromiter((request.slot for request in requests), np.int64, len(requests))
        has_some = any(request.extensions for request in requests)
        if not (has_some or self._has[slots].any()):
            return
        before = self._has[slots]
        has, uses = np.zeros_like(slots), np.zeros_like(slots)
        for index, request in enumerate(requests):
            for extension in request.extensions:
                bit, part = self._of_request[type(extension)]
                has[index] |= bit
                uses[index] |= bit if part.uses(extension) else 0
        # If a part fails, the parts before it keep state of a request that never runs. The slot's
        # next request must find their bits set.
        self._has[slots] = before | has
        self._uses[slots] = uses
        for kind, (bit, part) in self._of_request.items():
            if ((before | has) & bit).any():
                own = [extension_of(r.extensions, kind) for r in requests]
                part.admit(requests, own)
                if part.follows_tokens:
                    assert tokens is not None, "a part follows them"
                    part.begin(requests, own, tokens)
        self._has[slots] = has
        self.active_in_forward = int(np.bitwise_or.reduce(self._has)) & self.in_forward
        self.has_reports_of_forward = bool((self._has & self._reporting_forward).any())

    def used_by(self, slots: Int64s) -> int:
        """Return the bits of the parts that any of the rows uses."""
        return int(np.bitwise_or.reduce(self._uses[slots], initial=0))

    def used_in(self, step: ScheduledStep) -> int:
        """Return the bits of the parts around the forward pass that a step uses because of the
        positions of its tokens."""
        active = self.active_in_forward
        return sum(m.bit for m in self._members if active & m.bit and m.part.uses_step(step))

    def any_may_refuse(self, used: int) -> bool:
        """Return True if one of these parts may refuse tokens. Refusals are then sent with the
        tokens."""
        return bool(used & self.refusing)

    # The forward pass.

    def extended(self, plan: StepPlan, used: int) -> StepPlan:
        """Return the plan for steps that also use these parts."""
        used &= self.in_forward
        if not used:
            return plan
        kinds = [type(part) for bit, part in self._members if used & bit]
        shape = with_columns(plan.shape, kinds)
        plan = plan._replace(shape=shape, parts=used)
        return plan.corrected() if used & self.refusing else plan

    def graph_keys(self) -> list[int]:
        """Return the sets of parts for which graphs are captured: each part around the forward pass
        alone, and no part. Steps that use several such parts run eagerly."""
        own = (m for m in self._members if m.bit & self.in_forward and m.part.has_graphs)
        return [*(m.bit for m in own), 0]

    def largest(self, shape: StepShape) -> StepShape:
        """Return the shape with the columns of all parts, and of corrections."""
        shape = shape._replace(num_corrected=shape.num_seqs)
        return with_columns(shape, [type(m.part) for m in self._members])

    def fill(self, used: int, columns: StepColumns[Int32s], step: ScheduledStep) -> None:
        """Fill the columns of the parts that a step's plan names."""
        for column in columns.extra:
            column[:] = 0
        for bit, part, own in self._with_columns(used, columns.extra):
            part.fill(own, step, step.step_values.of(bit))

    def before_forward(self, used: int, hidden: Tensor, columns: StepColumns[Tensor]) -> Tensor:
        """Call the parts of the step's plan before the first layer."""
        for _, part, own in self._with_columns(used, columns.extra):
            hidden = part.before_forward(hidden, own)
        return hidden

    def forward_ended(self, used: int) -> None:
        """Tell the parts that the forward pass has ended or failed."""
        for bit, part in self._members:
            if used & bit:
                part.forward_ended()

    def after_forward(self, used: int, hidden: Tensor, columns: StepColumns[Tensor]) -> Tensor:
        """Call the parts of the step's plan after the last layer."""
        for _, part, own in self._with_columns(used, columns.extra):
            hidden = part.after_forward(hidden, own)
        return hidden

    def report_forward(
        self, hidden: Tensor, step: ScheduledStep, positions: PositionLogits
    ) -> tuple[Report, ...]:
        """Return what the reply reports about a step's forward pass."""
        has = int(np.bitwise_or.reduce(self._has[step.slots], initial=0))
        has &= self._reporting_forward
        own = (m.part for m in self._members if m.bit & has)
        found = (part.report_forward(hidden, step, positions) for part in own)
        return tuple(report for report in found if report is not None)

    # Pooling.

    def pool(self, hidden: Tensor, step: ScheduledStep) -> tuple[Report, ...]:
        """Pass a step's hidden states [N, H] to the parts that pool; return the outputs."""
        reports = (part.pool(hidden, step) for _, part in self._pooling)
        return tuple(report for report in reports if report is not None)

    # Sampling.

    def sample(
        self, logits: Tensor, rows: SampleRows, step_values: StepExtensions
    ) -> SamplerOutput:
        """Choose the token of each sample. logits [R, V]: in the model's dtype, not modified; each
        row is contiguous. Never waits for the device."""
        rows = rows.without_padding()
        used = rows.used | step_values.used
        acted = []
        for bit, part in self._members:
            if used & bit:
                logits = part.adjust_logits(logits, rows, step_values.of(bit))
                if bit & self._reporting:  # the others' logits need not be kept
                    acted.append((part, logits))
        token_ids = self.chooser.choose(logits, rows)
        chosen = Chosen(token_ids, logits, self.chooser)
        reports = (part.report(left, chosen, rows) for part, left in acted)
        made = tuple(report for report in reports if report is not None)
        refused = None
        if rows.drafted is None and used & (self.refusing | self._following):
            own, gained = rows.newest(), rows.newest_of(token_ids)
            refused = self._refuse(gained, own)
            self._gain(gained, refused, own)
        return SamplerOutput(token_ids, made, refused)

    def replay(self, logits: Tensor, token_ids: Tensor, rows: SampleRows) -> Chosen:
        """See PositionLogits. Steps' values are not known any more."""
        used = self.used_by(rows.slots_np)
        rows = rows._replace(used=used)
        for bit, part in self._members:
            if used & bit:
                logits = part.adjust_logits(logits, rows, None)
        return Chosen(token_ids, logits, self.chooser, are_drawn=False)

    def follow(self, token_ids: Tensor, rows: SampleRows) -> None:
        """Tell the parts which samples of a step with drafts its rows gain: token_ids int64 [R],
        NO_TOKEN for the others."""
        if rows.used & self._following:
            self._gain(token_ids, None, rows.without_padding())

    def launch_sampling(self, logits: Tensor) -> None:
        """Launch the parts' kernels for sampling inside compiling_ahead, where launches only
        request their kernels. logits [R, V], in the model's dtype, have any values. Each part gets
        them in that dtype and in float32, as the part before it may pass on either."""
        none = np.zeros(logits.shape[0], np.int64)
        column = torch.zeros(logits.shape[0], dtype=torch.int32, device=logits.device)
        rows = SampleRows(none, none, none.astype(np.int32), 0, column, column, column, None)
        for values in (logits, logits.float()):
            for _, part in self._members:
                part.launch_sampling(values, rows)

    def _gain(self, token_ids: Tensor, refused: Tensor | None, rows: SampleRows) -> None:
        gained = token_ids if refused is None else token_ids.masked_fill(refused > 0, NO_TOKEN)
        for bit, part in self._members:
            if rows.used & self._following & bit:
                part.gain(gained, rows)

    def _refuse(self, token_ids: Tensor, rows: SampleRows) -> Tensor | None:
        refused: Tensor | None = None
        for bit, part in self._members:
            if rows.used & self.refusing & bit:
                own = part.refuse(token_ids, rows)
                refused = own if refused is None else torch.maximum(refused, own)
        return None if refused is None else refused * (token_ids >= 0)

    def _with_columns(
        self, used: int, columns: Sequence[Any]
    ) -> Iterator[tuple[int, StepPart, Sequence[Any]]]:
        first = 0
        for bit, part in self._members:
            if used & bit:
                yield bit, part, columns[first : first + len(part.columns)]
                first += len(part.columns)


def _check_unique(field: str, extensions: Sequence[Extension]) -> None:
    kinds = [type(extension).__name__ for extension in extensions]
    twice = [kind for kind in kinds if kinds.count(kind) > 1]
    if twice:
        raise invalid(field, twice[0], "name each feature once")


def with_columns(shape: StepShape, parts: Sequence[type[StepPart]]) -> StepShape:
    """Return the shape of a step to which these parts add their columns."""
    return shape._replace(extra=tuple(_size(shape, per) for part in parts for per in part.columns))


def _size(shape: StepShape, per: Per) -> int:
    if per == "token":
        return shape.num_tokens
    return shape.num_seqs if per == "sequence" else shape.num_samples

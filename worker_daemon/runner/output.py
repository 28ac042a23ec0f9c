"""Brings a step's result to the host: copies it asynchronously, waits on the completion thread,
then encodes it."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import NamedTuple, Protocol

import numpy as np
import torch
from msgspec import structs
from torch import Tensor

from rpc_schema.codec import Frame
from rpc_schema.errors import CommError, UpstreamFailedError
from rpc_schema.step import ModelRunnerOutput
from worker_daemon.contracts.arrays import Bools, Int32s, Int64s
from worker_daemon.device.failures import typed_device_error
from worker_daemon.device.pinned import download
from worker_daemon.distributed.link import Link
from worker_daemon.distributed.pp import STATUS_MISMATCH, STATUS_OK
from worker_daemon.raising import raise_caused
from worker_daemon.runner.connectors.beside import LoadsBeside
from worker_daemon.runner.connectors.interface import Loaded
from worker_daemon.runner.parts.step_parts import SamplerOutput
from worker_daemon.runner.report import Report
from worker_daemon.runner.sample_rows import SampleRows
from worker_daemon.runner.staging import Delivered, Delivery
from worker_daemon.runner.token_history import FOLD_AT, Result, Sampled, TokenHistory
from worker_host.draft_counts import DraftCounts


class ReplyIdentity(NamedTuple):
    """The request that an output answers, the rank that answers, and the weights that it ran
    with."""

    epoch: int
    seq: int
    rank: int
    weights_version: int


class PendingOutput(Protocol):
    """A reply whose data may still be on its way to the host."""

    @property
    def is_ready(self) -> bool:
        """True if result() returns at once."""

    def result(self) -> tuple[ModelRunnerOutput, Sequence[Frame]]:
        """Wait for the reply and return it. Raises UpstreamFailedError if the step failed on an
        earlier stage."""


class StepReplies:
    """Builds a rank's replies; returns None on a rank that sends none."""

    def __init__(
        self, link: Link, history: TokenHistory, drafts: DraftCounts, *, is_output_rank: bool
    ) -> None:
        """drafts: where the outcomes of drafts are counted."""
        self._link = link
        self._drafts: DraftCounts | None = drafts
        self._history = history
        self._is_output_rank = is_output_rank

    @contextmanager
    def uncounted(self) -> Iterator[None]:
        """Count no drafts of the steps in the block, which no driver has sent. Those of earlier
        steps count, even if their results are taken meanwhile."""
        drafts, self._drafts = self._drafts, None
        try:
            yield
        finally:
            self._drafts = drafts

    def without_tokens(
        self, identity: ReplyIdentity, status: Tensor, reports: Sequence[Report] = ()
    ) -> PendingOutput | None:
        """Return the output of a step that samples nothing, or not yet. reports: its forward
        pass's."""
        if not self._is_output_rank:
            return None
        return NoTokens(identity, status, self._link, self._history, reports)

    def of_tokens(
        self, identity: ReplyIdentity, rows: SampleRows, sampled: SamplerOutput, status: Tensor
    ) -> PendingOutput | None:
        """Start the copies to the host."""
        if not self._is_output_rank:
            return None
        link, history = self._link, self._history
        counts = None if rows.groups is None else rows.groups.counts_np
        is_own = rows.num_newer == 0 if rows.given else None
        drafts = self._drafts if rows.has_drafts else None
        return StepOutput(
            identity,
            rows.sampled,
            rows.bitmap,
            sampled,
            status,
            link,
            history,
            counts,
            is_own,
            drafts,
        )

    def of_delivery(
        self, identity: ReplyIdentity, rows: SampleRows, delivery: Delivery
    ) -> PendingOutput | None:
        """Return the output of a step that writes its tokens to the host itself, and with drafts
        how many each row gains."""
        if not self._is_output_rank:
            return None
        link, history, groups = self._link, self._history, rows.groups
        if groups is None:
            delivered = delivery.expect(rows.slots_np.size)
            return DeliveredOutput(identity, rows.sampled, rows.bitmap, delivered, link, history)
        counts, drafts = groups.counts_np, self._drafts
        delivered = delivery.expect(rows.slots_np.size, counts.size)
        return DeliveredOutput(
            identity, rows.sampled, rows.bitmap, delivered, link, history, counts, drafts
        )


class StepOutput:
    """Made on the step thread; result() is called once: on the completion thread, or on the step
    thread if it is ready.

    The copies are enqueued after the step and before the next one, which may overwrite their
    sources. rows: of the tokens that are gained; slots: of these, as a bitmap; counts: [Q] samples
    of each, None for one each; is_own: bool [R], the samples that rows may gain, None for all;
    drafts: counts their outcomes, None if the step has none.
    """

    def __init__(
        self,
        identity: ReplyIdentity,
        rows: Sampled,
        slots: bytes,
        sampled: SamplerOutput,
        status: Tensor,
        link: Link,
        history: TokenHistory,
        counts: Int64s | None = None,
        is_own: Bools | None = None,
        drafts: DraftCounts | None = None,
    ) -> None:
        self._identity = identity
        self._rows = rows
        self._slots = slots
        self._history = history
        self._reports = sampled.reports
        reported = [column for report in sampled.reports for column in report.columns]
        self._counts = counts
        self._is_own = is_own
        self._drafts = drafts
        self._may_refuse = sampled.refused is not None
        refused = [] if sampled.refused is None else [sampled.refused]
        self._copies = _HostCopies([status, sampled.token_ids, *refused, *reported], link)

    @property
    def is_ready(self) -> bool:
        """True if result() returns at once."""
        return self._copies.on_host

    def result(self) -> tuple[ModelRunnerOutput, Sequence[Frame]]:
        """Wait for the copies and return the reply with its frames.

        Raises:
            UpstreamFailedError: an earlier stage failed in this step.
            CommError: it sent another step, or the link was aborted meanwhile.
            DeviceError: the device is lost.
        """
        columns, counts = self._copies.wait(), self._counts
        is_own = self._is_own
        if self._may_refuse:
            refused = columns.pop(1).numpy()
            if refused.any():
                whole = np.ones(refused.size, np.int64) if counts is None else counts
                counts = whole - refused
                kept = _is_among_first(whole, counts)
                is_own = None if is_own is None else is_own[kept]
                columns = self._kept(columns, kept)
        column, *reported = columns
        token_ids = column.numpy().astype("<i4")
        sent = token_ids.tobytes()
        num_sampled = b"" if counts is None else counts.astype(np.uint8).tobytes()
        own, gained = sent, num_sampled
        if is_own is not None and counts is not None and self._counts is not None:
            own = token_ids[is_own].tobytes()
            gained = (counts == self._counts).astype(np.uint8).tobytes()
        if self._drafts is not None and counts is not None and self._counts is not None:
            _count(self._drafts, self._counts, counts)
        identity = self._identity
        _record(self._history, Result(identity.epoch, identity.seq, self._rows, own, gained))
        reply = ModelRunnerOutput(
            epoch=identity.epoch,
            seq=identity.seq,
            rank=identity.rank,
            slots=self._slots,
            sampled_token_ids=sent,
            extensions=tuple(report.extension for report in self._reports),
            num_sampled=num_sampled,
            weights_version=self._identity.weights_version,
        )
        return reply, _frames(self._reports, reported)

    def _kept(self, columns: Sequence[Tensor], kept: Bools) -> list[Tensor]:
        """Return the columns with an entry for each sample without those that were refused."""
        per_row = [True, *(r.per_row for r in self._reports for _ in r.columns)]
        chosen = torch.from_numpy(kept)
        return [
            column[chosen] if is_filtered else column
            for column, is_filtered in zip(columns, per_row, strict=True)
        ]


class DeliveredOutput:
    """The output of a step whose tokens the device writes to the host itself. Only a sole stage has
    it, so there is no other stage's status. Otherwise like StepOutput. counts: [Q] samples of each
    row in a step with drafts, None for one each."""

    is_ready = False

    def __init__(
        self,
        identity: ReplyIdentity,
        rows: Sampled,
        slots: bytes,
        tokens: Delivered,
        link: Link,
        history: TokenHistory,
        counts: Int64s | None = None,
        drafts: DraftCounts | None = None,
    ) -> None:
        self._identity = identity
        self._rows = rows
        self._slots = slots
        self._tokens = tokens
        self._link = link
        self._history = history
        self._counts = counts
        self._drafts = drafts

    def result(self) -> tuple[ModelRunnerOutput, Sequence[Frame]]:
        """Wait for the tokens and return the reply.

        Raises:
            CommError: the link was aborted meanwhile.
            DeviceError: the device is lost.
        """
        try:
            token_ids = self._tokens.wait()
        except RuntimeError as error:
            raise_caused(typed_device_error(error), error)
        if self._link.is_aborted:
            self._link.raise_if_aborted()
        num_sampled = b""
        if self._counts is not None:
            gained = self._tokens.counts
            kept = _is_among_first(self._counts, gained)
            token_ids = np.frombuffer(token_ids, "<i4")[kept].tobytes()
            num_sampled = gained.astype(np.uint8).tobytes()
            if self._drafts is not None:
                _count(self._drafts, self._counts, gained)
        identity = self._identity
        _record(
            self._history, Result(identity.epoch, identity.seq, self._rows, token_ids, num_sampled)
        )
        reply = ModelRunnerOutput(
            epoch=identity.epoch,
            seq=identity.seq,
            rank=identity.rank,
            slots=self._slots,
            sampled_token_ids=token_ids,
            num_sampled=num_sampled,
            weights_version=identity.weights_version,
        )
        return reply, []


class NoTokens:
    """The output rank's output for a step that samples nothing, or not yet."""

    def __init__(
        self,
        identity: ReplyIdentity,
        status: Tensor,
        link: Link,
        history: TokenHistory,
        reports: Sequence[Report] = (),
    ) -> None:
        self._identity = identity
        self._reports = reports
        reported = [column for report in reports for column in report.columns]
        self._copies = _HostCopies([status, *reported], link)
        self._history = history

    @property
    def is_ready(self) -> bool:
        """True if result() returns at once."""
        return self._copies.on_host

    def result(self) -> tuple[ModelRunnerOutput, Sequence[Frame]]:
        """Wait for the step's status. Raises as StepOutput does."""
        reported = self._copies.wait()
        identity = self._identity
        _record(self._history, Result(identity.epoch, identity.seq))
        reply = ModelRunnerOutput(
            epoch=identity.epoch,
            seq=identity.seq,
            rank=identity.rank,
            extensions=tuple(report.extension for report in self._reports),
            weights_version=identity.weights_version,
        )
        return reply, _frames(self._reports, reported)


class LoadingOutput:
    """The output of a step that has loaded blocks: names those whose contents did not match. They
    are known with the step's result, since its forward pass waits for its loads. Names those, too,
    that were loaded beside steps and are there by now."""

    def __init__(self, output: PendingOutput, loaded: Loaded | None, beside: LoadsBeside) -> None:
        """loaded: the step's own."""
        self._output = output
        self._loaded = loaded
        self._beside = beside

    @property
    def is_ready(self) -> bool:
        """True if result() returns at once."""
        return self._output.is_ready and (self._loaded is None or self._loaded.is_known)

    def result(self) -> tuple[ModelRunnerOutput, Sequence[Frame]]:
        """Return the reply. Raises as the step's own output does."""
        reply, frames = self._output.result()
        arrived = self._beside.take_known()
        known = arrived if self._loaded is None else [self._loaded, *arrived]
        invalid = b"".join(_ids(each.invalid_blocks) for each in known)
        there = b"".join(_ids(each.block_ids) for each in arrived)
        if invalid or there:
            age_s = arrived[-1].end.age_s if arrived else 0.0
            reply = structs.replace(
                reply,
                invalid_blocks=invalid,
                arrived_blocks=there,
                arrived_us_ago=round(1e6 * age_s),
            )
        return reply, frames


def _ids(block_ids: Int32s) -> bytes:
    return block_ids.astype("<i4", copy=False).tobytes()


class _HostCopies:
    """A step's status and result columns on their way to the host. On CUDA the host memory is
    pinned, and the copies are complete once the event recorded after them is."""

    def __init__(self, columns: Sequence[Tensor], link: Link) -> None:
        self._link = link
        self._columns = columns
        self._copied: torch.cuda.Event | None = None
        if any(column.is_cuda for column in columns):
            self._columns = [download(column) for column in columns]
            self._copied = _record_event()

    @property
    def on_host(self) -> bool:
        """An event for the CPU: the device is the host, so there is nothing to wait for."""
        return self._copied is None

    def wait(self) -> list[Tensor]:
        """Return the result columns. Raises what StepOutput.result does."""
        try:
            if self._copied is not None:
                self._copied.synchronize()
        except RuntimeError as error:
            raise_caused(typed_device_error(error), error)
        if self._link.is_aborted:
            self._link.raise_if_aborted()
        status, *columns = self._columns
        _raise_for_status(int(status))
        return columns


def _raise_for_status(status: int) -> None:
    if status == STATUS_OK:
        return
    if status == STATUS_MISMATCH:
        raise CommError(
            "PP_MISMATCH: the previous stage sent another step than this one, or another shape or "
            "dtype",
            fix="relink; if that does not help, give all ranks the same model and versions",
        )
    raise UpstreamFailedError("an earlier pipeline stage failed in this step")


def _record_event() -> torch.cuda.Event:
    event = torch.cuda.Event(blocking=True)  # type: ignore[no-untyped-call]
    event.record()
    return event


def _record(history: TokenHistory, result: Result) -> None:
    history.unrecorded.append(result)
    if len(history.unrecorded) >= FOLD_AT:
        history.fold()


def _is_among_first(whole: Int64s, counts: Int64s | Int32s) -> Bools:
    """Return [R], True for the first `counts` of each sequence's `whole` samples."""
    firsts = np.cumsum(whole) - whole
    place = np.arange(int(whole.sum())) - np.repeat(firsts, whole)
    among: Bools = place < np.repeat(counts, whole)
    return among


def _frames(reports: Sequence[Report], columns: Sequence[Tensor]) -> list[Frame]:
    """Return the reports' frames. columns: all of theirs, on the host."""
    frames: list[Frame] = []
    first = 0
    for report in reports:
        raw = [_raw(column) for column in columns[first : first + len(report.columns)]]
        first += len(raw)
        frames += [b"".join(raw)] if report.is_one_frame else raw
    return frames


def _raw(column: Tensor) -> bytes:
    values = np.ascontiguousarray(column.numpy())
    return values.astype(values.dtype.newbyteorder("<"), copy=False).tobytes()


def _count(drafts: DraftCounts, samples: Int64s, gained: Int64s | Int32s) -> None:
    """Count the drafts of a step's rows. samples, gained [Q]: those of each row, at least one if it
    had drafts."""
    for num_samples, num_gained in zip(samples.tolist(), gained.tolist(), strict=True):
        if num_samples > 1:
            drafts.add(num_samples - 1, num_gained - 1)

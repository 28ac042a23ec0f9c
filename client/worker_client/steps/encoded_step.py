"""Holds a step as sent: its frames and its steady requests. Translates its reply back into request
ids."""

from array import array
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from types import MappingProxyType
from typing import Any, Final, TypeAlias

import numpy as np
from msgspec import Struct
from numpy.typing import NDArray

from rpc_schema.codec import Frame, StepReplyMessage
from rpc_schema.errors import BadFrameError
from rpc_schema.extensions import ReplyExtension
from rpc_schema.pooling import PooledOutputs
from rpc_schema.step import ModelRunnerOutput
from worker_client.parts.registry import NONE_POOLED, Extensions, read_reports
from worker_client.scheduler_output import SchedulerOutput, StepResult
from worker_client.steps.drafts import NO_DRAFTS, DraftedSamples
from worker_client.steps.several_samples import ONE_EACH, TokenRows, read_samples, token_rows
from worker_client.steps.steady_drafts import SteadyDrafts

Int32s = NDArray[np.int32]
_INT32 = np.dtype("<i4")
NONE_DEFERRED: Final[Mapping[int, str]] = MappingProxyType({})
Confirm: TypeAlias = Callable[[], None]


class StepEnvelope(Struct, frozen=True, gc=False):
    """Numbers of a step, and a last word before it counts as sent."""

    epoch: int
    link: int
    seq: int
    confirm: Confirm | None = None
    """Called just before the step is accounted for. If it raises, nothing has changed."""
    replica_counts: bytes = b""
    """See ExecuteModel."""


class SteadyRequests:
    """Requests that decode one token a step, and everything that stays the same from step to step:
    the driver's side of the daemon's SteadyBatch. Each step that has them carries it."""

    __slots__ = (
        "bitmap",
        "bits",
        "num_pending",
        "req_ids",
        "slots",
        "slots_bytes",
        "sorted_req_ids",
    )

    def __init__(self, req_ids: tuple[str, ...], slots: Int32s, capacity: int) -> None:
        order = np.argsort(slots)
        self.req_ids = req_ids
        self.slots: Int32s = slots[order]
        self.slots_bytes = self.slots.astype("<u2").tobytes()
        self.sorted_req_ids = tuple(req_ids[i] for i in order.tolist())
        self.bits = np.zeros(capacity, np.bool_)
        self.bits[slots] = True
        self.bitmap = pack_bits(self.bits)
        self.num_pending = 0
        """Steps whose effect on the rows' counts is not in the arrays yet."""


class EncodedStep:
    """A step as sent: its frames, and the data needed to read its reply or to undo it."""

    __slots__ = (
        "deferred",
        "extra_req_ids",
        "extra_slots",
        "frames",
        "is_later",
        "left",
        "num_drafts",
        "num_samples",
        "output",
        "pooled",
        "reporting",
        "resync",
        "seq",
        "steady",
        "steady_drafts",
    )

    def __init__(
        self,
        seq: int,
        output: SchedulerOutput,
        frames: list[Frame],
        steady: SteadyRequests | None,
        extra_slots: Sequence[int],
        extra_req_ids: Sequence[str],
        reporting: Mapping[str, Extensions],
        *,
        pooled: Mapping[int, str] = NONE_POOLED,
        resync: bool = False,
        deferred: Mapping[int, str] = NONE_DEFERRED,
        is_later: bool = False,
        num_samples: Mapping[str, int] = ONE_EACH,
        num_drafts: Mapping[str, int] = NO_DRAFTS,
        steady_drafts: SteadyDrafts | None = None,
    ) -> None:
        self.seq = seq
        self.output = output
        self.frames = frames
        self.steady = steady
        self.extra_slots = extra_slots
        """Slots of other requests that sample in this step."""
        self.extra_req_ids = extra_req_ids
        self.reporting = reporting
        """Extensions of the requests whose replies have more than tokens, as of this step."""
        self.pooled = pooled
        """Requests that end with an output of this step, by slot."""
        self.resync = resync
        """Sent in full: if this one fails, the rows it names cannot be trusted either."""
        self.deferred = deferred
        """Requests whose sampling waits, by slot."""
        self.left = {**deferred} if deferred else {}
        """Those of them that were not sampled yet."""
        self.is_later = is_later
        """It is the later sampling of a step's requests; some may have finished since."""
        self.num_samples = num_samples
        """Samples of the requests that do not have one each."""
        self.num_drafts = num_drafts
        """Drafts of the requests that have some."""
        self.steady_drafts = steady_drafts
        """Its requests, if all of them decode, some with drafts."""

    @property
    def by_replica(self) -> Sequence[Sequence[Frame]]:
        """The frames, once for all ranks."""
        return (self.frames,)

    @property
    def left_req_ids(self) -> list[str]:
        """Deferred requests that were not sampled yet."""
        return list(self.left.values())

    def later(self, chosen: Mapping[int, str], frames: list[Frame]) -> "EncodedStep":
        """Return the later sampling of deferred requests, given by slot, as sent in frames."""
        slots, req_ids = list(chosen), list(chosen.values())
        return EncodedStep(
            self.seq,
            self.output,
            frames,
            None,
            slots,
            req_ids,
            self.reporting,
            resync=self.resync,
            is_later=True,
            num_samples=self.num_samples,
            num_drafts=self.num_drafts,
        )

    def sampled_bitmap(self) -> tuple[bytes, Sequence[str]]:
        """Return the slots that sample at once as a bitmap, and their request ids, slots
        ascending."""
        if self.steady_drafts is not None:
            return self.steady_drafts.bitmap, self.steady_drafts.samples.req_ids
        steady = self.steady
        if steady is not None and not (self.extra_slots or self.deferred):
            return steady.bitmap, steady.sorted_req_ids
        slots, req_ids = self.sampled()
        return bitmap_of(slots), req_ids

    def sampled(self) -> tuple[bytes, Sequence[str]]:
        """Return the slots that sample at once, ascending, as little-endian uint16, and their
        request ids."""
        steady = self.steady
        if steady is not None and not (self.extra_slots or self.deferred):
            return steady.slots_bytes, steady.sorted_req_ids
        pairs = list(zip(self.extra_slots, self.extra_req_ids, strict=True))
        if steady is not None:
            pairs += zip(steady.slots.tolist(), steady.sorted_req_ids, strict=True)
        if self.deferred:
            pairs = [pair for pair in pairs if pair[0] not in self.deferred]
        pairs.sort()
        return array("H", [slot for slot, _ in pairs]).tobytes(), [req_id for _, req_id in pairs]


def decode_reply(
    step: EncodedStep, reply: ModelRunnerOutput, arrays: Sequence[Frame]
) -> StepResult:
    """Turn a reply to `step` into request ids. Requests that finished before the deferred
    sampling of their step may be missing.

    Raises:
        BadFrameError: the reply does not fit the step.
    """
    slots, req_ids = step.sampled_bitmap()
    if step.is_later and reply.slots != slots:
        slots, req_ids = _those_left(*step.sampled(), reply.slots)
    if step.num_drafts:
        return _decode_drafted(step, reply, arrays, slots, req_ids)
    rows: TokenRows | None = None
    gained, is_whole = req_ids, True
    if reply.num_sampled or step.num_samples:
        rows = token_rows(req_ids, reply.num_sampled, step.num_samples)
        gained, is_whole = ([], False) if rows is None else (rows.gained, True)
    if reply.slots != slots or len(reply.sampled_token_ids) != 4 * len(gained) or not is_whole:
        raise _unfit(step, req_ids)
    token_ids: list[int] = np.frombuffer(reply.sampled_token_ids, _INT32).tolist()
    version = reply.weights_version
    if rows is None and not (reply.extensions or step.pooled):
        return StepResult(gained, token_ids, weights_version=version)
    reports = _read_reports(step, reply, arrays, gained)
    if rows is None:
        return StepResult(gained, token_ids, reports, weights_version=version)
    if not rows.several:
        return StepResult(gained, token_ids, reports, rows.refused, version)
    samples = read_samples(rows.several, token_ids, reply.extensions, arrays, step.reporting)
    pairs = [pair for pair in zip(gained, token_ids, strict=True) if pair[0]]
    req_ids, token_ids = [pair[0] for pair in pairs], [pair[1] for pair in pairs]
    return StepResult(req_ids, token_ids, reports, rows.refused, version, samples)


def decode_outcome(
    step: EncodedStep | None, reply: StepReplyMessage, arrays: Sequence[Frame]
) -> StepResult:
    """Turn the reply to a request that was sent as a step into its result. step: None if it has no
    requests.

    Raises:
        BadFrameError: the reply does not fit the step.
    """
    if not isinstance(reply, ModelRunnerOutput):
        raise BadFrameError(f"step {reply.seq} was answered with {type(reply).__name__}")
    if step is None:
        return StepResult((), (), weights_version=reply.weights_version)
    result = decode_reply(step, reply, arrays)
    if reply.invalid_blocks or reply.arrived_blocks:
        invalid = _read_blocks("invalid_blocks", reply.invalid_blocks)
        arrived = _read_blocks("arrived_blocks", reply.arrived_blocks)
        ago_s = reply.arrived_us_ago / 1e6
        return replace(result, invalid_blocks=invalid, arrived_blocks=arrived, arrived_s_ago=ago_s)
    return result


def _read_blocks(field: str, raw: bytes) -> list[int]:
    if len(raw) % 4:
        raise BadFrameError(f"ModelRunnerOutput.{field} is no sequence of int32")
    block_ids: list[int] = np.frombuffer(raw, _INT32).tolist()
    return block_ids


def _decode_drafted(
    step: EncodedStep,
    reply: ModelRunnerOutput,
    arrays: Sequence[Frame],
    slots: bytes,
    req_ids: Sequence[str],
) -> StepResult:
    """Turn a reply to a step with drafts into request ids. slots: those that sample, as a bitmap;
    req_ids: their requests. Raises as decode_reply does."""
    steady = step.steady_drafts
    samples = DraftedSamples.of(req_ids, step.num_drafts) if steady is None else steady.samples
    gains = samples.read_gains(reply.num_sampled)
    if gains is None or reply.slots != slots:
        raise _unfit(step, req_ids)
    if len(reply.sampled_token_ids) != 4 * len(gains.req_ids):
        raise _unfit(step, req_ids)
    token_ids: list[int] = np.frombuffer(reply.sampled_token_ids, _INT32).tolist()
    result = StepResult(
        gains.req_ids,
        token_ids,
        refused=gains.refused,
        weights_version=reply.weights_version,
        drafts=gains.outcomes,
    )
    if not (reply.extensions or step.pooled):
        return result
    reports = _read_reports(step, reply, arrays, gains.req_ids)
    several = samples.several(gains.counts)
    told = {name: own for name, own in several.items() if name in step.reporting}
    gained = read_samples(told, token_ids, reply.extensions, arrays, step.reporting)
    return replace(result, reports=reports, gained=gained)


def _unfit(step: EncodedStep, req_ids: Sequence[str]) -> BadFrameError:
    return BadFrameError(
        f"step {step.seq} was to sample {len(req_ids)} slots; the reply's columns differ"
    )


def _read_reports(
    step: EncodedStep,
    reply: ModelRunnerOutput,
    arrays: Sequence[Frame],
    gained: Sequence[str],
) -> Mapping[type[ReplyExtension], Mapping[str, Any]]:
    """Return a reply's reports and pooled outputs. gained: the request of each token."""
    reports = read_reports(reply.extensions, arrays, gained, step.reporting, step.pooled)
    if len(reports.get(PooledOutputs, ())) != len(step.pooled):
        raise BadFrameError(f"step {step.seq} was to end {len(step.pooled)} requests with outputs")
    return reports


def _those_left(slots: bytes, req_ids: Sequence[str], named: bytes) -> tuple[bytes, Sequence[str]]:
    """Return those of a step's slots that the bitmap names, also as a bitmap, and their
    requests."""
    pairs = zip(np.frombuffer(slots, "<u2").tolist(), req_ids, strict=True)
    left = [
        (slot, req_id)
        for slot, req_id in pairs
        if slot // 8 < len(named) and named[slot // 8] >> slot % 8 & 1
    ]
    return bitmap_of(array("H", [slot for slot, _ in left]).tobytes()), [r for _, r in left]


def bitmap_of(slots: bytes) -> bytes:
    """Slots, as little-endian uint16, to a bitmap without zero bytes at its end."""
    numbers = np.frombuffer(slots, "<u2")
    if not numbers.size:
        return b""
    bits = np.zeros(int(numbers.max()) + 1, np.bool_)
    bits[numbers] = True
    return pack_bits(bits)


def pack_bits(bits: NDArray[np.bool_]) -> bytes:
    """Convert slots to a bitmap without trailing zero bytes."""
    return np.packbits(bits, bitorder="little").tobytes().rstrip(b"\0")

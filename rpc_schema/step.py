"""Step messages, which name slots and only the changes since the last step. A driver's
`client/worker_client/steps/slots.py` writes these messages, `runner/` reads them.

A request gets a slot at admission and keeps it until it finishes. Preemption is a finish;
resumption is a new admission with all tokens so far. Integer columns travel as raw little-endian
bytes; prompt tokens as one int32 frame after the message.
"""

from typing import Annotated, Final

from msgspec import Meta

from rpc_schema.base import (
    Count,
    Name,
    Positive,
    RawInt32,
    RawUInt8,
    RawUInt16,
    StepReply,
    StepRequest,
    Unsigned,
    Value,
)
from rpc_schema.extensions import ReplyExtensions, RequestExtensions, StepExtensions

NO_TOKEN: Final = -1
"""Returned for a slot whose logits contain NaN or have no finite maximum. Only its request fails:
the other slots of the step have their tokens. The KV that the request wrote must not be shared."""

Bitmap = Annotated[bytes, Meta(max_length=8192)]
"""Bit s % 8 (least significant first) of byte s // 8 represents slot s."""


Slot = Annotated[int, Meta(ge=0, le=65534)]

SchedulerNote = Annotated[bytes, Meta(max_length=1 << 16)]
"""Note of a scheduler on a request, returned to another driver that continues it. Opaque to
daemons."""


class NewRequestData(Value, frozen=True, kw_only=True):
    """An admission, or the resumption of a preempted request."""

    slot: Slot
    req_id: Name
    num_tokens: Positive
    """Tokens of this request in frame 0 of the message: the prompt, then the tokens generated
    before a preemption."""
    num_prompt_tokens: Positive
    num_computed_tokens: Count
    """Leading tokens whose KV is in the cache already: a prefix hit. Less than num_tokens."""
    extensions: RequestExtensions = ()
    """The optional features that it uses; without any, sampling is greedy. With PoolingParams it
    samples nothing."""
    note: SchedulerNote = b""


class ExecuteModel(StepRequest["ModelRunnerOutput"], frozen=True, tag=1, kw_only=True):
    """One step: the scheduler's output, as a difference to the previous step (seq - 1), or in full.

    Order of application: finished, resync, corrections, scheduled_new_reqs, new blocks, then the
    scheduled tokens. A slot whose scheduled tokens reach its last known token samples one token
    (or as many as num_samples says), or, for a pooling request, has its output in the reply. Frame
    0 holds the tokens of scheduled_new_reqs, in their order, if there are any; the frames of
    extensions follow. With data_parallel_lockstep each replica's ranks get the replica's own
    message and frames. A replica may have no tokens in a step.

    If drafts, or another feature, may refuse tokens that a step has counted, a slot's counts of
    computed and of known tokens are upper bounds: the device has the true ones, from which a step
    continues. Replies report refused tokens; corrections lower both counts by them.
    """

    total_num_scheduled_tokens: Count
    """The sum over the scheduled slots, as a checksum."""
    scheduled: Bitmap = b""
    """The slots that take part; each has one token unless num_scheduled_tokens says otherwise."""
    num_scheduled_tokens: RawInt32 = b""
    """Pairs (slot, tokens) for the scheduled slots with other than one token, slots ascending."""
    new_block_slots: RawUInt16 = b""
    """For each of new_block_ids, the slot whose block table it is appended to."""
    new_block_ids: RawInt32 = b""
    """In order of position. In a group with a window, the null block (0) replaces blocks that no
    token from a new request's num_computed_tokens on sees."""
    finished: RawUInt16 = b""
    """Slots to free before anything else."""
    scheduled_new_reqs: tuple[NewRequestData, ...] = ()
    resync: RawInt32 | None = None
    """A full resynchronization: rows (slot, num_computed_tokens, num_tokens, num_blocks of each
    group), slots ascending, of all slots that stay; blocks that a window has passed count too.
    Slots not named are freed; if a named slot's counts differ, the step is refused. A
    resynchronization clears an earlier failure, and closes a gap: its seq only needs to be new."""
    deferred: Bitmap | None = None
    """Slots whose sampling waits for a SampleTokens that names this seq: each must sample in this
    step. The others are sampled at once. None: all are. In a step that defers, the slots that
    sample and those that earlier steps have still to sample, ended requests included, are at most
    max_num_seqs: their logits stay on the device."""
    extensions: StepExtensions = ()
    """Extensions for the sampling of deferred slots may come with the SampleTokens instead; if a
    kind is in both, the later one counts."""
    new_block_groups: RawUInt8 = b""
    """For each of new_block_ids, the KV group of its block table; empty: the first."""
    corrections: RawInt32 = b""
    """Pairs (slot, tokens): reduction of a slot's counts for tokens that earlier steps have
    refused. A slot occurs once, and only if it had drafts or a feature of its request may
    refuse."""
    num_drafts: RawInt32 = b""
    """Pairs (slot, drafts), slots ascending: so many of the slot's scheduled tokens, the last ones,
    are drafts of tokens that it has not sampled (speculative decoding); at most
    num_speculative_tokens. The scheduled tokens reach as far beyond the last known token. The slot
    samples after its last known token and after each draft; it gains the samples up to and
    including the first that differs from the draft at its place, or after whose draft nothing may
    be sampled (NO_TOKEN). The slot's counts grow as if all drafts were accepted; the refused rest
    is reported and corrected as above. The step then has no num_samples."""
    draft_token_ids: RawInt32 = b""
    """The drafts of num_drafts, in that order; -1 for a draft that the device has made after the
    slot's last step. Empty: the device has all of them."""
    settled: Bitmap = b""
    """Scheduled slots of which all steps with drafts have their outcomes: with the corrections of
    this message, their counts are exact until their next drafts. Else they stay upper bounds."""
    num_samples: RawInt32 = b""
    """Pairs (slot, samples) for slots that sample in this step, and not one token: one after each
    of their last scheduled tokens, at most max_samples_per_seq. The last sample continues the
    request. The others are at positions whose tokens it has: what the model would have chosen
    there, as if the request ended before."""
    skip_drafts: bool = False
    """The workers make no drafts after this step, to save the time: the next steps of its slots
    have none of theirs."""
    replica_counts: RawInt32 = b""
    """With data_parallel_lockstep [replicas, 2], the same for all ranks: the numbers of requests
    and of tokens that each replica has in this step. Else empty."""


class SampleTokens(StepRequest["ModelRunnerOutput"], frozen=True, tag=2, kw_only=True):
    """Sample slots that a step has deferred. The frames are those of extensions."""

    step_seq: Unsigned
    extensions: StepExtensions = ()
    slots: Bitmap | None = None
    """Slots to sample now, if the masks take several messages. None: all remaining ones. Slots
    whose request has finished since are skipped."""


class ExecuteDummyBatch(StepRequest["ModelRunnerOutput"], frozen=True, tag=3, kw_only=True):
    """A one-token forward pass without effect on any request."""


class ModelRunnerOutput(StepReply, frozen=True, tag=1, kw_only=True):
    """Result of a step or a SampleTokens."""

    slots: Bitmap = b""
    """Slots that sampled, without trailing zero bytes."""
    sampled_token_ids: RawInt32 = b""
    """The tokens of each slot, slots ascending, oldest first; NO_TOKEN (-1) if the logits contain
    NaN or have no finite maximum."""
    extensions: ReplyExtensions = ()
    """Reports of features, which own the frames; one entry for each sampled token unless the report
    says otherwise."""
    num_sampled: RawUInt8 = b""
    """Number of tokens of each slot in sampled_token_ids; empty: one each. If fewer than the step's
    samples of the slot, a feature has refused the newest; of a slot with drafts, the number that it
    has gained, at least one unless a feature refuses it."""
    weights_version: Unsigned = 0
    """Number of the version of the weights that the step ran with."""
    invalid_blocks: RawInt32 = b""
    """Blocks that the step was to load from the host tier (HostTierMoves), and whose contents did
    not match on this rank; with those of arrived_blocks."""
    arrived_blocks: RawInt32 = b""
    """Blocks whose loads beside steps (HostTierMoves.num_beside) have ended on this rank since the
    last reply that named some."""
    arrived_us_ago: Unsigned = 0
    """Time since the last of these has ended, about; 0 if that is not known."""


class Done(StepReply, frozen=True, tag=2, kw_only=True):
    """Completion of an operation that has no other result."""

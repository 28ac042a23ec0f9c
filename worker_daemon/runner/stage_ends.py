"""The two ends of a pipeline stage: what it waits for before it computes, and what becomes of what
it computed. Chosen once, by the stage's place.

Shapes: N tokens, H hidden size, R sequences that sample. Status is an int64 scalar (see
distributed/pp.py), on the device where there are other stages.
"""

from collections.abc import Sequence
from typing import Protocol

import torch
from torch import Tensor

from rpc_schema.codec import Frame
from rpc_schema.step import ModelRunnerOutput
from worker_daemon.device.failures import FailureKind, drop_scratch, judge
from worker_daemon.distributed.link import Link
from worker_daemon.distributed.pp import STATUS_OK, Arrival, Inbound
from worker_daemon.distributed.tokens import TokenReturn
from worker_daemon.errors import CommError
from worker_daemon.models.decoder import DecoderStage
from worker_daemon.runner.input_batch import StepInputs
from worker_daemon.runner.output import DeliveredOutput, NoTokens, ReplyIdentity, StepOutput
from worker_daemon.runner.parts.step_parts import SamplerOutput, StepParts
from worker_daemon.runner.row_tables import RowTables
from worker_daemon.runner.sample_rows import SampleRows
from worker_daemon.runner.scheduled_step import StepExtensions
from worker_daemon.runner.slot_bitmap import SlotBitmaps
from worker_daemon.runner.stage_program import SamplingInputs
from worker_daemon.runner.token_history import TokenHistory


class PendingOutput(Protocol):
    """A reply whose data may still be on its way to the host."""

    @property
    def is_ready(self) -> bool:
        """Whether result() returns at once."""

    def result(self) -> tuple[ModelRunnerOutput, Sequence[Frame]]:
        """Wait for it. Raises UpstreamFailedError where the step failed before this stage."""


class Entering(Protocol):
    """What one step's forward pass needs of other stages, on its way in."""

    def wait(self, inputs: StepInputs) -> tuple[Tensor, Tensor]:
        """Return (what arrived: hidden [N, H], or [0, H] on the first stage; status)."""

    def discard(self) -> None:
        """The step failed on this rank: take what the neighbour sends, so that the hop stays in
        order."""


class StageEntry(Protocol):
    """What a stage waits for."""

    def post(self, num_tokens: int, seq: int) -> Entering:
        """Start to get the hidden states of step seq, before anything else of the step is done."""


class FirstStageEntry:
    """Waits for the tokens that a step before has sampled, if this one reads them."""

    def __init__(self, tokens: TokenReturn, nothing: Tensor, status_device: torch.device) -> None:
        """nothing: [0, H], what arrives from no stage."""
        self._tokens = tokens
        self._nothing = nothing
        self._ok = torch.full((), STATUS_OK, dtype=torch.int64, device=status_device)

    def post(self, num_tokens: int, seq: int) -> Entering:
        return self

    def wait(self, inputs: StepInputs) -> tuple[Tensor, Tensor]:
        self._tokens.collect(inputs.tokens_from)
        return self._nothing, self._ok

    def discard(self) -> None:
        return None


class LaterStageEntry:
    """Receives from the stage before, and waits for counts that the last one has changed, if the
    step reads any."""

    def __init__(self, inbound: Inbound, tokens: TokenReturn) -> None:
        self._inbound = inbound
        self._tokens = tokens

    def post(self, num_tokens: int, seq: int) -> Entering:
        return _Receiving(self._inbound.post(num_tokens, seq), self._tokens)


class _Receiving:
    def __init__(self, arrival: Arrival, tokens: TokenReturn) -> None:
        self._arrival = arrival
        self._tokens = tokens
        self._arrived = False

    def wait(self, inputs: StepInputs) -> tuple[Tensor, Tensor]:
        if inputs.counts_from >= 0:
            self._tokens.collect(inputs.counts_from)
        self._arrived = True
        return self._arrival.wait()

    def discard(self) -> None:
        if not self._arrived:
            self._arrived = True
            self._arrival.wait()


class StageExit(Protocol):
    """What becomes of a step once its hidden states are sent on."""

    def give_up(self, slots: Tensor, publication: int, *, counted: bool) -> None:
        """The step failed here: take part in the return of its tokens, without any. counted: as
        TokenReturn.publish has it."""

    def sample(
        self,
        chosen: SamplingInputs,
        rows: SampleRows,
        status: Tensor,
        brought: StepExtensions,
        publication: int,
        identity: ReplyIdentity,
    ) -> PendingOutput | None:
        """Sample rows and return their tokens to the other stages."""

    def reply_without_tokens(self, status: Tensor, identity: ReplyIdentity) -> PendingOutput | None:
        """The step samples nothing, or not yet."""


class LastStageExit:
    """Logits, sampling, the return of the tokens, and on the output rank the reply."""

    def __init__(
        self,
        stage: DecoderStage,
        parts: StepParts,
        tables: RowTables,
        tokens: TokenReturn,
        link: Link,
        history: TokenHistory,
        *,
        replies: bool,
    ) -> None:
        self._stage = stage
        self._link = link
        self._parts = parts
        self._tables = tables
        self._tokens = tokens
        self._history = history
        self._replies = replies
        self._bitmaps = SlotBitmaps()

    def give_up(self, slots: Tensor, publication: int, *, counted: bool) -> None:
        shape = (2, slots.shape[0]) if counted else slots.shape
        nothing = torch.zeros(shape, dtype=torch.int64, device=slots.device)
        self._tokens.publish(publication, slots, nothing, counted=counted)

    def sample(
        self,
        chosen: SamplingInputs,
        rows: SampleRows,
        status: Tensor,
        brought: StepExtensions,
        publication: int,
        identity: ReplyIdentity,
    ) -> PendingOutput | None:
        count = rows.slots_np.size
        if not rows.used | brought.used:
            self._tokens.publish_greedy(publication, rows.slots, chosen.greedy, count)
            if self._replies and rows.delivery is not None:
                delivered = rows.delivery.expect(count)
                slots = self._bitmaps.of(rows.slots_np)
                return DeliveredOutput(
                    identity, rows.sampled, slots, delivered, self._link, self._history
                )
            sampled = SamplerOutput(chosen.greedy[:count])
        else:
            sampled = self._sample_by_parts(chosen, rows, brought, publication)
            self._publish(chosen, rows, sampled, publication)
        if not self._replies:
            return None
        slots = self._bitmaps.of(rows.slots_np)
        return StepOutput(identity, rows.sampled, slots, sampled, status, self._link, self._history)

    def _publish(
        self, chosen: SamplingInputs, rows: SampleRows, sampled: SamplerOutput, publication: int
    ) -> None:
        """Return the tokens that the rows go on with: where one was refused, the one before it."""
        slots = rows.slots[: rows.slots_np.size]
        token_ids, refused = sampled.token_ids, sampled.refused
        if refused is None:
            self._tokens.publish(publication, slots, token_ids, counted=False)
            return
        assert chosen.inputs is not None, "steps that may refuse keep their last tokens"
        token_ids = torch.where(refused > 0, chosen.inputs[: slots.shape[0]], token_ids)
        total = self._tables.refuse(slots, token_ids, refused)
        news = torch.stack((token_ids, total.long()))
        self._tokens.publish(publication, slots, news, counted=True)

    def _sample_by_parts(
        self, chosen: SamplingInputs, rows: SampleRows, brought: StepExtensions, publication: int
    ) -> SamplerOutput:
        count = rows.slots_np.size
        try:
            logits = self._stage.compute_logits(chosen.hidden[:count])
            return self._parts.sample(logits, rows, brought)
        except CommError:
            raise
        except Exception as error:
            if judge(error) is FailureKind.LOST:
                raise
            drop_scratch(error)
            counted = self._parts.counts(rows.used)
            self.give_up(rows.slots[:count], publication, counted=counted)
            raise

    def reply_without_tokens(self, status: Tensor, identity: ReplyIdentity) -> PendingOutput | None:
        if not self._replies:
            return None
        return NoTokens(identity, status, self._link, self._history)


class EarlierStageExit:
    """Takes the tokens that the last stage sampled."""

    def __init__(self, parts: StepParts, tokens: TokenReturn) -> None:
        self._parts = parts
        self._tokens = tokens

    def give_up(self, slots: Tensor, publication: int, *, counted: bool) -> None:
        self._tokens.publish(publication, slots, None, counted=counted)

    def sample(
        self,
        chosen: SamplingInputs,
        rows: SampleRows,
        status: Tensor,
        brought: StepExtensions,
        publication: int,
        identity: ReplyIdentity,
    ) -> PendingOutput | None:
        counted = self._parts.counts(rows.used)
        self._tokens.publish(publication, rows.slots[: rows.slots_np.size], None, counted=counted)
        return None

    def reply_without_tokens(self, status: Tensor, identity: ReplyIdentity) -> PendingOutput | None:
        return None

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
from worker_daemon.device.failures import Verdict, drop_scratch, judge
from worker_daemon.distributed.link import Link
from worker_daemon.distributed.pp import STATUS_OK, Arrival, Inbound
from worker_daemon.distributed.tokens import TokenReturn
from worker_daemon.errors import CommError
from worker_daemon.models.decoder import DecoderStage
from worker_daemon.runner.grammar_input import apply_masks
from worker_daemon.runner.input_batch import InputBuilder, SampleRows, StepInputs
from worker_daemon.runner.output import DeliveredOutput, NoTokens, ReplyIdentity, StepOutput
from worker_daemon.runner.slot_bitmap import SlotBitmaps
from worker_daemon.runner.stage_program import Chosen
from worker_daemon.runner.token_history import TokenHistory
from worker_daemon.sample.sampler import SamplerOutput, sample, sampling_for


class PendingReply(Protocol):
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
    """Receives from the stage before."""

    def __init__(self, inbound: Inbound) -> None:
        self._inbound = inbound

    def post(self, num_tokens: int, seq: int) -> Entering:
        return _Receiving(self._inbound.post(num_tokens, seq))


class _Receiving:
    def __init__(self, arrival: Arrival) -> None:
        self._arrival = arrival
        self._arrived = False

    def wait(self, inputs: StepInputs) -> tuple[Tensor, Tensor]:
        self._arrived = True
        return self._arrival.wait()

    def discard(self) -> None:
        if not self._arrived:
            self._arrived = True
            self._arrival.wait()


class StageExit(Protocol):
    """What becomes of a step once its hidden states are sent on."""

    def give_up(self, slots: Tensor, publication: int) -> None:
        """The step failed here: take part in the return of its tokens, without any."""

    def sample(
        self,
        chosen: Chosen,
        rows: SampleRows,
        status: Tensor,
        masks: Tensor | None,
        publication: int,
        identity: ReplyIdentity,
    ) -> PendingReply | None:
        """Sample rows and return their tokens to the other stages. masks: bool [R, V], False bans a
        token."""

    def reply_without_tokens(self, status: Tensor, identity: ReplyIdentity) -> PendingReply | None:
        """The step samples nothing, or not yet."""


class LastStageExit:
    """Logits, sampling, the return of the tokens, and on the output rank the reply."""

    def __init__(
        self,
        stage: DecoderStage,
        inputs: InputBuilder,
        tokens: TokenReturn,
        link: Link,
        history: TokenHistory,
        *,
        replies: bool,
    ) -> None:
        self._stage = stage
        self._link = link
        self._inputs = inputs
        self._tokens = tokens
        self._history = history
        self._replies = replies
        self._bitmaps = SlotBitmaps()
        self._sampling = sampling_for(inputs.tables.last_sampled.device)

    def give_up(self, slots: Tensor, publication: int) -> None:
        nothing = torch.zeros(slots.shape, dtype=torch.int64, device=slots.device)
        self._tokens.publish(publication, slots, nothing)

    def sample(
        self,
        chosen: Chosen,
        rows: SampleRows,
        status: Tensor,
        masks: Tensor | None,
        publication: int,
        identity: ReplyIdentity,
    ) -> PendingReply | None:
        count = rows.slots_np.size
        if masks is None and rows.are_plain:
            self._tokens.publish_greedy(publication, rows.slots, chosen.greedy, count)
            if self._replies and rows.delivery is not None:
                delivered = rows.delivery.expect(count)
                slots = self._bitmaps.of(rows.slots_np)
                return DeliveredOutput(
                    identity, rows.sampled, slots, delivered, self._link, self._history
                )
            sampled = SamplerOutput(chosen.greedy[:count], None)
        else:
            sampled = self._sample_by_parameters(chosen, rows, masks, publication)
            self._tokens.publish(publication, rows.slots[:count], sampled.token_ids)
        if not self._replies:
            return None
        slots = self._bitmaps.of(rows.slots_np)
        return StepOutput(identity, rows.sampled, slots, sampled, status, self._link, self._history)

    def _sample_by_parameters(
        self, chosen: Chosen, rows: SampleRows, masks: Tensor | None, publication: int
    ) -> SamplerOutput:
        count = rows.slots_np.size
        try:
            logits = apply_masks(self._stage.compute_logits(chosen.hidden[:count]), masks)
            return sample(logits, self._inputs.sampling_metadata(rows), self._sampling)
        except CommError:
            raise
        except Exception as error:
            if judge(error) is Verdict.LOST:
                raise
            drop_scratch(error)
            self.give_up(rows.slots[:count], publication)
            raise

    def reply_without_tokens(self, status: Tensor, identity: ReplyIdentity) -> PendingReply | None:
        if not self._replies:
            return None
        return NoTokens(identity, status, self._link, self._history)


class EarlierStageExit:
    """Takes the tokens that the last stage sampled."""

    def __init__(self, tokens: TokenReturn) -> None:
        self._tokens = tokens

    def give_up(self, slots: Tensor, publication: int) -> None:
        self._tokens.publish(publication, slots, None)

    def sample(
        self,
        chosen: Chosen,
        rows: SampleRows,
        status: Tensor,
        masks: Tensor | None,
        publication: int,
        identity: ReplyIdentity,
    ) -> PendingReply | None:
        self._tokens.publish(publication, rows.slots[: rows.slots_np.size], None)
        return None

    def reply_without_tokens(self, status: Tensor, identity: ReplyIdentity) -> PendingReply | None:
        return None

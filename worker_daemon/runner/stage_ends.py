"""The two ends of a pipeline stage: where hidden states come from, and where they go. Chosen once,
by the stage's place.

Shapes: N tokens, H hidden size, R sequences that sample. Status is an int64 scalar on the device
(see distributed/pp.py).
"""

from collections.abc import Sequence
from typing import Protocol

import torch
from torch import Tensor

from rpc_schema.codec import Frame
from rpc_schema.step import ModelRunnerOutput
from worker_daemon.distributed.link import Link
from worker_daemon.distributed.pp import STATUS_OK, Arrival, Inbound
from worker_daemon.distributed.tokens import TokenReturn
from worker_daemon.errors import CommError
from worker_daemon.models.decoder import DecoderStage
from worker_daemon.runner.grammar_input import apply_masks
from worker_daemon.runner.input_batch import InputBuilder, SampleRows, StepInputs
from worker_daemon.runner.output import NoTokens, ReplyIdentity, StepOutput
from worker_daemon.runner.request_state import Int64s
from worker_daemon.runner.staging import upload
from worker_daemon.sample.sampler import sample


class PendingReply(Protocol):
    """A reply whose data may still be on its way to the host."""

    def result(self) -> tuple[ModelRunnerOutput, Sequence[Frame]]:
        """Wait for it. Raises UpstreamFailedError where the step failed before this stage."""


class Entering(Protocol):
    """Hidden states of one step on their way in."""

    def wait(self, inputs: StepInputs) -> tuple[Tensor, Tensor]:
        """Return (hidden [N, H], status)."""

    def discard(self) -> None:
        """The step failed on this rank: take what the neighbour sends, so that the hop stays in
        order."""


class StageEntry(Protocol):
    """Where a stage's hidden states come from."""

    def post(self, num_tokens: int, seq: int) -> Entering:
        """Start to get the hidden states of step seq, before anything else of the step is done."""


class FirstStageEntry:
    """Embeds tokens: from the host, or as sampled by a step that may still be running."""

    def __init__(self, stage: DecoderStage, inputs: InputBuilder, tokens: TokenReturn) -> None:
        self._stage = stage
        self._inputs = inputs
        self._tokens = tokens
        self._ok = torch.full((), STATUS_OK, dtype=torch.int64, device=inputs.last_sampled.device)

    def post(self, num_tokens: int, seq: int) -> Entering:
        return self

    def wait(self, inputs: StepInputs) -> tuple[Tensor, Tensor]:
        self._tokens.collect(inputs.tokens_from)
        return self._stage.embed(self._inputs.gather_token_ids(inputs)), self._ok

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
    """What becomes of a stage's hidden states once they are sent on."""

    def choose(self, hidden: Tensor, rows: SampleRows) -> Tensor:
        """Return what sampling will need of hidden [N, H]: [R, H] on the last stage, nothing
        elsewhere."""

    def keep(self, chosen: Tensor, kept: Int64s) -> Tensor:
        """Return what was chosen for these rows only: kept int64 [R'] indexes the rows."""

    def give_up(self, slots: Tensor, publication: int) -> None:
        """The step failed here: take part in the return of its tokens, without any."""

    def sample(
        self,
        chosen: Tensor,
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
        *,
        replies: bool,
    ) -> None:
        self._stage = stage
        self._link = link
        self._inputs = inputs
        self._tokens = tokens
        self._replies = replies

    def choose(self, hidden: Tensor, rows: SampleRows) -> Tensor:
        return hidden[rows.token_indices]

    def keep(self, chosen: Tensor, kept: Int64s) -> Tensor:
        return chosen[upload(kept, chosen.device)]

    def give_up(self, slots: Tensor, publication: int) -> None:
        self._tokens.publish(publication, slots, torch.zeros_like(slots))

    def sample(
        self,
        chosen: Tensor,
        rows: SampleRows,
        status: Tensor,
        masks: Tensor | None,
        publication: int,
        identity: ReplyIdentity,
    ) -> PendingReply | None:
        try:
            logits = apply_masks(self._stage.compute_logits(chosen), masks)
            sampled = sample(logits, self._inputs.sampling_metadata(rows))
        except CommError:
            raise
        except Exception:
            self.give_up(rows.slots, publication)
            raise
        self._tokens.publish(publication, rows.slots, sampled.token_ids)
        if not self._replies:
            return None
        return StepOutput(identity, rows.slots_np, sampled, status, self._link)

    def reply_without_tokens(self, status: Tensor, identity: ReplyIdentity) -> PendingReply | None:
        return NoTokens(identity, status, self._link) if self._replies else None


class EarlierStageExit:
    """Takes the tokens that the last stage sampled."""

    def __init__(self, tokens: TokenReturn) -> None:
        self._tokens = tokens

    def choose(self, hidden: Tensor, rows: SampleRows) -> Tensor:
        return hidden[:0]

    def keep(self, chosen: Tensor, kept: Int64s) -> Tensor:
        return chosen

    def give_up(self, slots: Tensor, publication: int) -> None:
        self._tokens.publish(publication, slots, None)

    def sample(
        self,
        chosen: Tensor,
        rows: SampleRows,
        status: Tensor,
        masks: Tensor | None,
        publication: int,
        identity: ReplyIdentity,
    ) -> PendingReply | None:
        self._tokens.publish(publication, rows.slots, None)
        return None

    def reply_without_tokens(self, status: Tensor, identity: ReplyIdentity) -> PendingReply | None:
        return None

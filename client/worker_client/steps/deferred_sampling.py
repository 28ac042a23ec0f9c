"""Keeps track of the requests that wait for WorkerGroup.sample_tokens. A step computes their
logits, and the workers hold a copy of each row until it is sampled."""

from collections.abc import Collection, Iterable, Mapping, Sequence
from itertools import chain

from rpc_schema.codec import Frame, encode_step
from rpc_schema.step import SampleTokens
from worker_client.scheduler_output import SchedulerOutput, StepValues
from worker_client.steps.encoded_step import EncodedStep, SteadyRequests, StepEnvelope
from worker_client.steps.sent_counts import ScheduledRows
from worker_client.steps.step_fault import StepFault, refuse, wrong_ids
from worker_client.steps.step_values import ALL_AT_ONCE, StepSampling, named, sampling_of


class DeferredSampling:
    """The requests of a SlotTable whose last token waits to be sampled."""

    def __init__(self, num_slots: int) -> None:
        self._num_slots = num_slots
        self.slots: set[int] = set()
        """Slots of the requests that wait and have not ended."""
        self._held: dict[int, int] = {}
        """By a step's seq, its requests that wait, ended or not."""

    def check(
        self,
        output: SchedulerOutput,
        steady: SteadyRequests | None,
        rows: ScheduledRows,
        ended: Sequence[int],
        slot_of: Mapping[str, int],
        *,
        resync: bool,
    ) -> StepSampling | StepFault:
        """Check what a step samples at once and later, and under which masks. steady, rows: its
        requests; resync: it is sent in full."""
        fault = None
        if self.slots:
            decoding = [] if steady is None else steady.slots.tolist()
            fault = self._waiting_fault(chain(rows.slots.tolist(), decoding), ended, slot_of)
        if fault is not None:
            return fault
        if not output.extensions:
            return ALL_AT_ONCE
        sampling_slots = dict(zip(rows.sampling_ids, rows.sampling_slots, strict=True))
        if steady is not None:
            sampling_slots |= zip(steady.sorted_req_ids, steady.slots.tolist(), strict=True)
        sampling = sampling_of(output.extensions, sampling_slots)
        if isinstance(sampling, StepSampling) and sampling.deferred:
            fault = self._room_fault(len(sampling_slots), resync=resync)
        return fault or sampling

    def encode(
        self,
        step: EncodedStep,
        chosen: Mapping[int, str],
        values: Sequence[StepValues],
        slot_of: Mapping[str, int],
        envelope: StepEnvelope,
    ) -> list[Frame]:
        """Encode a SampleTokens of requests that a step has deferred, given by slot, and account
        for it. Raises as SlotTable.encode_sampling does."""
        staying = {name: slot for slot, name in chosen.items() if slot_of.get(name) == slot}
        sampling = sampling_of(values, staying)
        if isinstance(sampling, StepFault):
            refuse(sampling)
        request = SampleTokens(
            epoch=envelope.epoch,
            link=envelope.link,
            seq=envelope.seq,
            step_seq=step.seq,
            extensions=sampling.extensions,
            slots=None if len(chosen) == len(step.left) else named(chosen),
        )
        frames = encode_step(request, sampling.frames)
        if envelope.confirm is not None:
            envelope.confirm()
        self._take(step, chosen, slot_of)
        return frames

    def _room_fault(self, num_sampling: int, *, resync: bool) -> StepFault | None:
        """Check that the workers have memory for the logits of a step that defers: one row for each
        slot. resync: the step is sent in full; workers then drop the logits of earlier steps."""
        held = 0 if resync else sum(self._held.values())
        if held + num_sampling <= self._num_slots:
            return None
        return StepFault(
            f"{num_sampling} requests sample in a step that defers some, and {held} of earlier "
            f"steps wait for their sampling: more than max_num_seqs = {self._num_slots} together",
            field="deferred",
            value=f"{num_sampling} requests",
            fix=f"call WorkerGroup.sample_tokens for step {min(self._held)} first, even if its "
            "requests have finished",
        )

    def _waiting_fault(
        self, scheduled: Iterable[int], ended: Collection[int], slot_of: Mapping[str, int]
    ) -> StepFault | None:
        """Check that no scheduled slot waits for its sampling, unless its request ends."""
        waiting = self.slots.intersection(scheduled).difference(ended)
        if not waiting:
            return None
        names = [req_id for req_id, slot in slot_of.items() if slot in waiting]
        message = "its last token waits for WorkerGroup.sample_tokens"
        return wrong_ids(message, "num_scheduled_tokens, decode_req_ids", names)

    def defer(self, seq: int, slots: Collection[int]) -> None:
        """Record the requests that a step defers."""
        self.slots.update(slots)
        self._held[seq] = len(slots)

    def _take(self, step: EncodedStep, chosen: Iterable[int], slot_of: Mapping[str, int]) -> None:
        """Record that deferred requests of a step, given by slot, were sampled."""
        for slot in list(chosen):
            if slot_of.get(step.left.pop(slot)) == slot:
                self.slots.discard(slot)
        if step.left:
            self._held[step.seq] = len(step.left)
        else:
            self._held.pop(step.seq, None)

    def release(self, slots: Iterable[int]) -> None:
        """End the requests in these slots. The workers hold their logits until they are sampled."""
        self.slots.difference_update(slots)

    def drop_held(self) -> None:
        """Record that the workers have dropped all logits: a step was sent in full."""
        self._held.clear()

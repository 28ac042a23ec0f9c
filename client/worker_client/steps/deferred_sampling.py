"""Keeps track of the requests that wait for WorkerGroup.sample_tokens. A step computes their
logits, and the workers hold a copy of each row until it is sampled."""

from collections.abc import Collection, Iterable, Mapping

from worker_client.steps.encoded_step import EncodedStep
from worker_client.steps.step_fault import StepFault, wrong_ids


class DeferredSampling:
    """The requests of a SlotTable whose last token waits to be sampled."""

    def __init__(self, num_slots: int) -> None:
        self._num_slots = num_slots
        self.slots: set[int] = set()
        """Slots of the requests that wait and have not ended."""
        self._held: dict[int, int] = {}
        """By a step's seq, its requests that wait, ended or not."""

    def room_fault(self, num_sampling: int, *, resync: bool) -> StepFault | None:
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

    def waiting_fault(
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

    def take(self, step: EncodedStep, chosen: Iterable[int], slot_of: Mapping[str, int]) -> None:
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

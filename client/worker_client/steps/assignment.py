"""Assigns slots to requests, the lowest free one first."""

from collections.abc import Collection, Iterable, Mapping, Sequence
from itertools import chain, repeat
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from worker_client.parts.registry import Extensions, pools, reports
from worker_client.scheduler_output import NewRequest, SchedulerOutput
from worker_client.steps.encoded_step import SteadyRequests
from worker_client.steps.step_checks import repeated, unknown_request
from worker_client.steps.step_fault import StepFault, not_running, wrong_ids

Int32s = NDArray[np.int32]
_NONE_NEW: Mapping[str, int] = {}


class Members(NamedTuple):
    """Requests of a checked step."""

    ended_ids: Sequence[str]
    ended: Sequence[int]
    """Slots of those, ascending."""
    slot_of_new: Mapping[str, int]
    new: Sequence[NewRequest]
    slots: Int32s
    """Slots of the requests of num_scheduled_tokens."""


class SlotAssignment:
    """The requests of a SlotTable, by slot."""

    def __init__(self, num_slots: int) -> None:
        self._num_slots = num_slots
        self.slot_of: dict[str, int] = {}
        """Slots of the requests; changed only here."""
        self._is_free = np.ones(num_slots, np.bool_)
        self.reporting: Mapping[str, Extensions] = {}
        """Extensions of the requests whose replies contain more than tokens. Replaced, never
        changed: steps in flight share it."""

    def slots(
        self, req_ids: Sequence[str], slot_of_new: Mapping[str, int] = _NONE_NEW
    ) -> Int32s | StepFault:
        """Return the slots of requests, some of which may be new."""
        slot_of = self.slot_of
        if slot_of_new:
            slot_of = {req_id: slot_of[req_id] for req_id in req_ids if req_id in slot_of}
            slot_of.update(slot_of_new)
        try:
            return np.fromiter(map(slot_of.__getitem__, req_ids), np.int32, len(req_ids))
        except (KeyError, TypeError):
            unknown = next(r for r in req_ids if not isinstance(r, str) or r not in slot_of)
            return unknown_request(unknown)

    def slots_left(self, req_ids: Collection[str]) -> NDArray[np.int64]:
        """Return the slots of requests, -1 for those that have none any more."""
        return np.fromiter(map(self.slot_of.get, req_ids, repeat(-1)), np.int64, len(req_ids))

    def known(self, *groups: Iterable[str]) -> list[str]:
        """Return those that have a slot, each once. Raises TypeError: one is not hashable."""
        return list(dict.fromkeys([name for name in chain(*groups) if name in self.slot_of]))

    def live(self, ended: Sequence[int]) -> Int32s:
        """Return the slots that have requests, ascending, but for those in `ended`."""
        is_live = ~self._is_free
        is_live[ended] = False
        return np.flatnonzero(is_live).astype(np.int32)

    def check(
        self,
        output: SchedulerOutput,
        steady: SteadyRequests | None,
        counts: Mapping[str, int],
        new: Sequence[NewRequest],
    ) -> Members | StepFault:
        """Check who takes part in a step, who begins and who ends. Nothing changes yet."""
        try:
            ended_ids = self.known(output.finished_req_ids, output.preempted_req_ids)
        except TypeError:  # not hashable
            names = chain(output.finished_req_ids, output.preempted_req_ids)
            wrong = [name for name in names if not isinstance(name, str)]
            return wrong_ids("request ids are strings", "finished_req_ids", wrong)
        ended, gone = sorted(self.slot_of[req_id] for req_id in ended_ids), set(ended_ids)
        slot_of_new = self._place(new, gone, ended) if new else {}
        if isinstance(slot_of_new, StepFault):
            return slot_of_new
        fault = self._ended_fault(output, gone.difference(slot_of_new), ended, steady, counts)
        fault = fault or self._standing_fault(output, gone, slot_of_new)
        if fault is not None:
            return fault
        slots = self.slots([*counts], slot_of_new)
        if isinstance(slots, StepFault):
            return slots
        if steady is not None and steady.bits[slots].any():
            both = counts.keys() & set(steady.req_ids)
            message = "it is in decode_req_ids and in num_scheduled_tokens"
            return wrong_ids(message, "decode_req_ids", both)
        return Members(ended_ids, ended, slot_of_new, new, slots)

    def admit(self, members: Members, slots: Sequence[int]) -> None:
        """Give new requests their slots."""
        self.slot_of.update(members.slot_of_new)
        self._is_free[slots] = False
        for new in members.new:
            if new.extensions and not pools(new.extensions) and reports(new.extensions):
                self.reporting = {**self.reporting, new.req_id: new.extensions}

    def release(self, req_ids: Sequence[str]) -> list[int]:
        """Free the slots of known requests, and return them."""
        slots = [self.slot_of.pop(req_id) for req_id in req_ids]
        if not self.reporting.keys().isdisjoint(req_ids):
            gone = set(req_ids)
            self.reporting = {k: v for k, v in self.reporting.items() if k not in gone}
        self._is_free[slots] = True
        return slots

    def _place(
        self, new: Sequence[NewRequest], gone: Collection[str], ended: Sequence[int]
    ) -> Mapping[str, int] | StepFault:
        """Return the slots of new requests, the lowest free ones."""
        names = [request.req_id for request in new]
        if len({*names}) < len(new):
            return wrong_ids("it is new twice in one step", "scheduled_new_reqs", repeated(names))
        taken = [name for name in names if name in self.slot_of and name not in gone]
        if taken:
            return wrong_ids("it is new, but has a slot", "scheduled_new_reqs", taken)
        is_free = self._is_free.copy()
        is_free[ended] = True
        slots: list[int] = np.flatnonzero(is_free)[: len(new)].tolist()
        if len(slots) < len(new):
            return StepFault(
                f"only {len(slots)} of max_num_seqs = {self._num_slots} slots are free",
                field="scheduled_new_reqs",
                value=f"{len(new)} requests",
                fix="admit some later",
            )
        return dict(zip(names, slots, strict=True))

    def _ended_fault(
        self,
        output: SchedulerOutput,
        gone: Collection[str],
        ended: Sequence[int],
        steady: SteadyRequests | None,
        counts: Mapping[str, int],
    ) -> StepFault | None:
        """Check that no request ends and is scheduled. gone: those that do not restart."""
        decodes_on = steady is not None and steady.bits[ended].any()
        if not decodes_on and counts.keys().isdisjoint(gone):
            return None
        both = {*counts, *output.decode_req_ids}.intersection(gone)
        again = [name for name in output.decode_req_ids if self.slot_of.get(name) in ended]
        message = "it is finished and scheduled in the same step"
        return wrong_ids(message, "finished_req_ids", both or again)

    def _standing_fault(
        self, output: SchedulerOutput, gone: Collection[str], slot_of_new: Mapping[str, int]
    ) -> StepFault | None:
        """Check that blocks are appended only to requests that continue; new requests bring their
        own."""
        for given in (output.new_block_ids, *output.more_new_block_ids):
            for req_id in given:
                if req_id in slot_of_new or req_id in gone or req_id not in self.slot_of:
                    return not_running(req_id, given[req_id])
        return None

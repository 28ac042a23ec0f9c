"""The rows of replicas that take each step together: a slot table for each, and steps with a part
for each. Either all parts of a step are encoded and accounted for, or none is."""

from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from itertools import chain

import numpy as np

from rpc_schema.codec import Frame, encode_step
from worker_client.errors import ClientError
from worker_client.parts.registry import Extensions
from worker_client.scheduler_output import SchedulerOutput, StepResult, StepValues
from worker_client.steps.cached_blocks import CachedBlocks
from worker_client.steps.encoded_step import Confirm, EncodedStep, SteadyRequests, StepEnvelope
from worker_client.steps.lockstep_step import LockstepStep, SteadyReplicas
from worker_client.steps.slots import SlotTable, check_deferred, check_values
from worker_client.steps.steady_steps import MAX_STEADY, SteadyStep
from worker_client.steps.step_checks import WRONG_TYPE, GroupLimits, named_ids
from worker_client.steps.step_fault import StepFault, refuse, wrong_ids

_NOTHING = SchedulerOutput()


class LockstepSlots:
    """The slot tables of replicas in lockstep. Its methods are those of SlotTable, for all
    replicas; a request is in one of them. Belongs to one thread."""

    def __init__(self, max_num_seqs: int, limits: GroupLimits, num_replicas: int) -> None:
        """max_num_seqs, limits: of each replica."""
        self._tables = [SlotTable(max_num_seqs, limits) for _ in range(num_replicas)]
        self._steady: dict[tuple[SteadyRequests, ...], SteadyReplicas] = {}
        """Those of the last steps that went on as before."""

    def __len__(self) -> int:
        return sum(map(len, self._tables))

    def __contains__(self, req_id: str) -> bool:
        return any(req_id in table for table in self._tables)

    @property
    def tables(self) -> Sequence[SlotTable]:
        """The table of each replica."""
        return self._tables

    @property
    def req_ids(self) -> list[str]:
        """Ids of the requests that have a slot."""
        return [req_id for table in self._tables for req_id in table.req_ids]

    @property
    def stale(self) -> Collection[str]:
        """See SlotTable."""
        return frozenset(chain(*[table.stale for table in self._tables]))

    def drop_stale(self) -> frozenset[str]:
        """See SlotTable.drop_stale."""
        return frozenset(chain(*[table.drop_stale() for table in self._tables]))

    def encode(self, output: SchedulerOutput, *, epoch: int, link: int, seq: int) -> LockstepStep:
        """Encode a LockstepOutput. Raises as SlotTable.encode does; no table has changed then."""
        parts = self._parts_of(output)
        if output.extensions:
            parts = [_with_values(part, output.extensions) for part in parts]
        else:
            steps = self._begin_steady(parts)
            if steps is not None:
                return self._encode_steady(output, parts, steps, epoch, link, seq)
        counts = _counts(parts)
        encode = [
            partial(table.encode, part, epoch=epoch, link=link, seq=seq, replica_counts=counts)
            for table, part in zip(self._tables, parts, strict=True)
        ]
        return LockstepStep.of(
            seq, output, _all_or_none(encode, partial(self._check_places, parts))
        )

    def _begin_steady(self, parts: Sequence[SchedulerOutput]) -> list[SteadyStep] | None:
        """Take the blocks of a step whose requests go on as before, on all replicas; None if it is
        another one, or has a fault."""
        steps: list[SteadyStep] = []
        for table, part in zip(self._tables, parts, strict=True):
            step = table.begin_steady(part)
            if step is None:
                self._give_back(steps)
                return None
            steps.append(step)
        return steps

    def _give_back(self, steps: Sequence[SteadyStep]) -> None:
        for table, step in zip(self._tables, steps, strict=False):
            table.give_back(step)

    def _encode_steady(
        self,
        output: SchedulerOutput,
        parts: Sequence[SchedulerOutput],
        steps: Sequence[SteadyStep],
        epoch: int,
        link: int,
        seq: int,
    ) -> LockstepStep:
        """Encode a step that has begun on all replicas. Nothing is made for a replica but its
        message."""
        steady = self._steady_replicas(tuple([step.steady for step in steps]))
        envelope = StepEnvelope(epoch, link, seq, replica_counts=steady.counts)
        try:
            frames = [encode_step(step.message(envelope)) for step in steps]
        except BaseException:
            self._give_back(steps)
            raise
        for table, step in zip(self._tables, steps, strict=True):
            table.finish_steady(step)
        reporting = [table.reporting for table in self._tables]
        make_parts = partial(_steady_parts, seq, parts, frames, steady, reporting)
        return LockstepStep(seq, output, frames, make_parts, steady=steady)

    def _steady_replicas(self, by_replica: tuple[SteadyRequests, ...]) -> SteadyReplicas:
        steady = self._steady.get(by_replica)
        if steady is None:
            if len(self._steady) == MAX_STEADY:
                self._steady.clear()
            steady = self._steady[by_replica] = SteadyReplicas(by_replica)
        return steady

    def encode_sampling(
        self,
        step: LockstepStep,
        values: Sequence[StepValues],
        req_ids: Collection[str] | None,
        *,
        epoch: int,
        link: int,
        seq: int,
    ) -> LockstepStep | None:
        """Encode the sampling of requests that a step has deferred; None if none are left. Raises
        as SlotTable.encode_sampling does; no table has changed then. The other replicas get an
        empty step: all have the same seqs."""
        check_values(values)
        chosen = [
            table.left_of(part, req_ids)
            for table, part in zip(self._tables, step.parts, strict=True)
        ]
        check_deferred(step.seq, values, req_ids, {r for own in chosen for r in own.values()})
        if not any(chosen):
            return None
        counts = _counts([_NOTHING] * len(self._tables))
        encode = [
            partial(table.encode_chosen, part, own, values, epoch=epoch, link=link, seq=seq)
            if own
            else partial(
                table.encode, _NOTHING, epoch=epoch, link=link, seq=seq, replica_counts=counts
            )
            for table, part, own in zip(self._tables, step.parts, chosen, strict=True)
        ]
        return LockstepStep.of(step.seq, step.output, _all_or_none(encode))

    def fail(self, outputs: Iterable[SchedulerOutput]) -> frozenset[str]:
        """See SlotTable.fail. One without a part for each replica was never sent."""
        failed = [parts for output in outputs if (parts := self._whole(output)) is not None]
        lost = [
            table.fail([parts[place] for parts in failed])
            for place, table in enumerate(self._tables)
        ]
        return frozenset(chain(*lost))

    def drop_all(self) -> frozenset[str]:
        """See SlotTable.drop_all."""
        return frozenset(chain(*[table.drop_all() for table in self._tables]))

    def drop(self, req_ids: Collection[str]) -> frozenset[str]:
        """See SlotTable.drop."""
        return frozenset(chain(*[table.drop(req_ids) for table in self._tables]))

    def withdraw(self, output: SchedulerOutput) -> frozenset[str]:
        """See SlotTable.withdraw."""
        parts: object = getattr(output, "replicas", ())
        given = parts if isinstance(parts, tuple) else ()
        return self.drop_all().union(*map(named_ids, (output, *given)))

    def require_resync(self) -> None:
        """See SlotTable.require_resync."""
        for table in self._tables:
            table.require_resync()

    def leave_weights(self, planned: SchedulerOutput | None) -> None:
        """See SlotTable.leave_weights."""
        parts = None if planned is None else self._whole(planned)
        for place, table in enumerate(self._tables):
            table.leave_weights(None if parts is None else parts[place])

    def lose_contents(self) -> None:
        """See SlotTable.lose_contents."""
        for table in self._tables:
            table.lose_contents()

    def with_contents(self, blocks: CachedBlocks) -> CachedBlocks:
        """Raises ClientError: a block's id does not say which replica's it is."""
        raise ClientError("blocks of replicas in lockstep cannot be noted: attach without a cache")

    def take_outcome(self, seq: int, result: StepResult) -> None:
        """See SlotTable.take_outcome."""
        for table in self._tables:
            table.take_outcome(seq, result)

    def _parts_of(self, output: SchedulerOutput) -> Sequence[SchedulerOutput]:
        """Return the parts of a step. Raises InvalidSchedulerOutput: it does not have one for each
        replica."""
        parts = self._whole(output)
        if parts is None:
            message, most = "replicas in lockstep take each step together", len(self._tables)
            fix = f"a LockstepOutput with a SchedulerOutput for each of {most} replicas"
            refuse(StepFault(message, "replicas", getattr(output, "replicas", None), fix))
        return parts

    def _whole(self, output: SchedulerOutput) -> Sequence[SchedulerOutput] | None:
        """Return the parts of a step; None if it does not have one for each replica."""
        parts: object = getattr(output, "replicas", None)
        if not isinstance(parts, tuple) or len(parts) != len(self._tables):
            return None
        return parts if all(type(part) is SchedulerOutput for part in parts) else None

    def _check_places(self, parts: Sequence[SchedulerOutput]) -> None:
        """Raise InvalidSchedulerOutput if a request is new in a replica, and in another one or new
        there too. Each part is checked alone before."""
        places: dict[str, int] = {}
        for place, part in enumerate(parts):
            for new in part.scheduled_new_reqs:
                others = [each for each in range(len(parts)) if each != place]
                if places.setdefault(new.req_id, place) != place or any(
                    new.req_id in self._tables[other]
                    and new.req_id not in (*parts[other].finished_req_ids,)
                    and new.req_id not in (*parts[other].preempted_req_ids,)
                    for other in others
                ):
                    message = "it is in another replica"
                    refuse(wrong_ids(message, "scheduled_new_reqs", [new.req_id]))


def _with_values(part: SchedulerOutput, values: tuple[StepValues, ...]) -> SchedulerOutput:
    """Return a part with values of the whole step: those for other replicas are left out where it
    is encoded."""
    return replace(part, extensions=(*part.extensions, *values))


def _all_or_none(
    encode: Sequence[Callable[..., EncodedStep]], confirm: Confirm | None = None
) -> list[EncodedStep]:
    """Encode a step's parts: a table changes once the parts behind it are encoded, and confirm was
    called after the last one."""
    encoded: list[EncodedStep] = []

    def encode_from(place: int) -> None:
        is_last = place + 1 == len(encode)
        then = confirm if is_last else partial(encode_from, place + 1)
        encoded.append(encode[place](confirm=then))

    encode_from(0)
    return encoded[::-1]


def _counts(parts: Sequence[SchedulerOutput]) -> bytes:
    """Return ExecuteModel.replica_counts. Parts are not checked yet: nothing if they cannot be
    counted."""
    try:
        counts = [(part.num_requests, part.total_num_scheduled_tokens) for part in parts]
        return np.array(counts, "<i4").tobytes()
    except WRONG_TYPE:
        return b""


def _steady_parts(
    seq: int,
    parts: Sequence[SchedulerOutput],
    frames: Sequence[list[Frame]],
    steady: SteadyReplicas,
    reporting: Sequence[Mapping[str, Extensions]],
) -> list[EncodedStep]:
    """Return the step of each replica, all of whose requests go on as before."""
    by_replica = zip(parts, frames, steady.by_replica, reporting, strict=True)
    return [
        EncodedStep(seq, part, sent, requests, (), (), reports)
        for part, sent, requests, reports in by_replica
    ]

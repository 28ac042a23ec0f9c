"""A step of replicas in lockstep as sent: its frames for each replica, and what reads their replies
or undoes it."""

from collections.abc import Callable, Collection, Sequence
from functools import cached_property, reduce
from itertools import chain
from typing import Final

import numpy as np

from rpc_schema.codec import Frame, StepReplyMessage
from rpc_schema.step import ModelRunnerOutput
from worker_client.scheduler_output import SchedulerOutput, StepResult
from worker_client.steps.encoded_step import EncodedStep, SteadyRequests, decode_outcome

_INT32: Final = np.dtype("<i4")


class SteadyReplicas:
    """The requests of replicas that all decode one token a step, or have none; and what stays the
    same from step to step. Each step that has them carries it."""

    def __init__(self, by_replica: Sequence[SteadyRequests]) -> None:
        self.by_replica = by_replica
        sizes = [len(own.req_ids) for own in by_replica]
        self.counts = np.array([(size, size) for size in sizes], _INT32).tobytes()
        """See ExecuteModel.replica_counts."""
        self.replies = [(own.bitmap, 4 * size) for own, size in zip(by_replica, sizes, strict=True)]
        """For each replica, the slots in a reply and the bytes of its tokens."""
        self.req_ids = [*chain(*(own.sorted_req_ids for own in by_replica))]
        """Those of the first replica first, slots ascending."""


class LockstepStep:
    """A step as sent to all replicas. Like EncodedStep, as far as a group's futures need it."""

    def __init__(
        self,
        seq: int,
        output: SchedulerOutput,
        by_replica: Sequence[Sequence[Frame]],
        make_parts: Callable[[], Sequence[EncodedStep]],
        *,
        steady: SteadyReplicas | None = None,
        resync: bool = False,
        is_later: bool = False,
    ) -> None:
        """by_replica: the frames that are sent to each. make_parts: returns the step as each
        replica has it. steady: its requests, if all of them go on as before."""
        self.seq = seq
        """Number of the step; also that of its later sampling."""
        self.output = output
        self.by_replica = by_replica
        self._make_parts = make_parts
        self.steady = steady
        self.resync = resync
        """Sent in full to a replica: see EncodedStep."""
        self.is_later = is_later
        """It is the later sampling of a step's requests."""

    @classmethod
    def of(cls, seq: int, output: SchedulerOutput, parts: Sequence[EncodedStep]) -> "LockstepStep":
        """Return the step that consists of these parts, one for each replica."""
        return cls(
            seq,
            output,
            [part.frames for part in parts],
            lambda: parts,
            resync=any(part.resync for part in parts),
            is_later=any(part.is_later for part in parts),
        )

    @cached_property
    def parts(self) -> Sequence[EncodedStep]:
        """The step of each replica."""
        return self._make_parts()

    @property
    def deferred(self) -> Collection[str]:
        """Requests whose sampling waits."""
        return [req_id for part in self.parts for req_id in part.deferred.values()]

    @property
    def left_req_ids(self) -> list[str]:
        """Those of them that were not sampled yet."""
        return [req_id for part in self.parts for req_id in part.left_req_ids]


class ReplicaReplies:
    """The replies to a step of replicas in lockstep. Those of one token for each request that goes
    on as before are read together, once all are here."""

    def __init__(self, step: LockstepStep | None, num_replicas: int) -> None:
        """step: None if it has no requests."""
        self._step = step
        self._num_replicas = num_replicas
        self._steady = None if step is None else step.steady
        self._unread: dict[int, ModelRunnerOutput] = {}
        """By dp_rank, replies that fit and are read together."""
        self._results: dict[int, StepResult] = {}
        """By dp_rank, what the others were."""

    def take(self, dp_rank: int, reply: StepReplyMessage, arrays: Sequence[Frame]) -> bool:
        """Take a replica's reply; return True once those of all are here. Raises BadFrameError: it
        does not fit the step."""
        if (
            self._steady is not None
            and type(reply) is ModelRunnerOutput
            and (reply.slots, len(reply.sampled_token_ids)) == self._steady.replies[dp_rank]
            and not (
                reply.extensions
                or reply.num_sampled
                or reply.invalid_blocks
                or reply.arrived_blocks
            )
        ):
            self._unread[dp_rank] = reply
        else:
            part = None if self._step is None else self._step.parts[dp_rank]
            self._results[dp_rank] = decode_outcome(part, reply, arrays)
        return len(self._unread) + len(self._results) == self._num_replicas

    def result(self) -> StepResult:
        """Return the result of all replicas. Call it once all replies are here."""
        places = range(self._num_replicas)
        if self._steady is not None and not self._results:
            replies = [self._unread[place] for place in places]
            return _read(self._steady.req_ids, replies)
        return reduce(StepResult.joined, map(self._result_of, places))

    def _result_of(self, dp_rank: int) -> StepResult:
        if self._steady is None or dp_rank in self._results:
            return self._results[dp_rank]
        req_ids = self._steady.by_replica[dp_rank].sorted_req_ids
        return _read(req_ids, [self._unread[dp_rank]])


def _read(req_ids: Sequence[str], replies: Sequence[ModelRunnerOutput]) -> StepResult:
    """Return the result of replies that have one token for each of these requests."""
    raw = b"".join([reply.sampled_token_ids for reply in replies])
    token_ids: list[int] = np.frombuffer(raw, _INT32).tolist()
    return StepResult(req_ids, token_ids, weights_version=replies[0].weights_version)

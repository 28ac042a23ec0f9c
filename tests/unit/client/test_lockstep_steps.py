"""Steps of replicas in lockstep beside those of tables that know nothing of each other: the same
messages, the same results and the same refusals, whatever the replicas do."""

import random

import numpy as np
import pytest
from msgspec.structs import replace

from rpc_schema.codec import decode_step
from rpc_schema.errors import BadFrameError
from rpc_schema.step import ModelRunnerOutput
from worker_client.errors import InvalidSchedulerOutput
from worker_client.scheduler_output import LockstepOutput, NewRequest, SchedulerOutput, StepResult
from worker_client.steps.encoded_step import bitmap_of, decode_reply
from worker_client.steps.lockstep import LockstepSlots
from worker_client.steps.lockstep_step import ReplicaReplies
from worker_client.steps.slots import SlotTable
from worker_client.steps.step_checks import GroupLimits

SLOTS = 5
LIMITS = GroupLimits(num_blocks=4000, block_size=4)
IDS = {"epoch": 1, "link": 1}


class Requests:
    """The requests of a replica, which has blocks of its own."""

    def __init__(self, rng: random.Random, name: str) -> None:
        self.rng, self.name = rng, name
        self.next_id, self.next_block = 0, 0
        self.running: dict[str, int] = {}
        """Blocks of each."""
        self.decoding: tuple[str, ...] = ()

    def draw(self) -> SchedulerOutput:
        """A step that mostly goes on as the one before."""
        if self.rng.random() < 0.7:
            chosen = self.decoding and self.rng.sample(self.decoding, 1)
            return SchedulerOutput(
                decode_req_ids=self.decoding,
                new_block_ids={req_id: [self.block()] for req_id in chosen},
            )
        ended = [req_id for req_id in self.running if self.rng.random() < 0.3]
        for req_id in ended:
            del self.running[req_id]
        self.decoding = tuple(r for r in self.running if self.rng.random() < 0.9)
        new = []
        if len(self.running) + len(ended) < SLOTS and self.rng.random() < 0.7:
            self.next_id += 1
            req_id = f"{self.name}{self.next_id}"
            new = [NewRequest(req_id, np.arange(3, dtype=np.int32), 3, 0, [self.block()])]
            self.running[req_id] = 1
        counts = {each.req_id: 3 for each in new}
        return SchedulerOutput(counts, self.decoding, new, finished_req_ids=ended)

    def block(self) -> int:
        self.next_block += 1
        return self.next_block


def reply_to(step, rank, rng) -> ModelRunnerOutput:
    slots, req_ids = step.sampled()
    return ModelRunnerOutput(
        epoch=1,
        seq=step.seq,
        rank=rank,
        weights_version=7,
        slots=bitmap_of(slots),
        sampled_token_ids=np.array([rng.randrange(99) for _ in req_ids], "<i4").tobytes(),
    )


@pytest.mark.parametrize("num_replicas", [2, 3])
def test_each_replica_gets_what_it_would_get_alone(num_replicas):
    seed = random.randrange(1 << 30)
    print(f"seed {seed}")
    rng = random.Random(seed)
    together = LockstepSlots(SLOTS, LIMITS, num_replicas)
    alone = [SlotTable(SLOTS, LIMITS) for _ in range(num_replicas)]
    requests = [Requests(rng, "abc"[place]) for place in range(num_replicas)]
    num_steady = num_changed = num_refused = 0
    for seq in range(1, 120):
        parts = [own.draw() for own in requests]
        if rng.random() < 0.15:
            wrong = rng.randrange(num_replicas)
            bad = [*parts]
            bad[wrong] = SchedulerOutput(
                decode_req_ids=parts[wrong].decode_req_ids, new_block_ids={"nobody": [1]}
            )
            with pytest.raises(InvalidSchedulerOutput, match="nobody"):
                together.encode(LockstepOutput.of(bad), **IDS, seq=seq)
            num_refused += 1
        step = together.encode(LockstepOutput.of(parts), **IDS, seq=seq)
        own_steps = [
            table.encode(part, **IDS, seq=seq) for table, part in zip(alone, parts, strict=True)
        ]
        num_steady += step.steady is not None
        num_changed += step.steady is None
        counts = [[part.num_requests, part.total_num_scheduled_tokens] for part in parts]
        for frames, own in zip(step.by_replica, own_steps, strict=True):
            message = decode_step(frames)
            assert np.frombuffer(message.replica_counts, "<i4").reshape(-1, 2).tolist() == counts
            assert replace(message, replica_counts=b"") == decode_step(own.frames)
            assert frames[1:] == own.frames[1:]
        replies = ReplicaReplies(step, num_replicas)
        results = []
        order = rng.sample(range(num_replicas), num_replicas)
        answers = [reply_to(own, rank, rng) for rank, own in enumerate(own_steps)]
        for place in order:
            assert replies.take(place, answers[place], []) == (place == order[-1])
        results = [decode_reply(own, answers[r], []) for r, own in enumerate(own_steps)]
        result = replies.result()
        assert list(result.req_ids) == [r for each in results for r in each.req_ids]
        assert list(result.token_ids) == [t for each in results for t in each.token_ids]
        assert result.weights_version == 7
    assert num_steady > 10 and num_changed > 10 and num_refused


def steady_step() -> tuple[LockstepSlots, LockstepOutput]:
    """Two replicas with two requests each that decode."""
    slots = LockstepSlots(SLOTS, LIMITS, 2)
    names = [("a", "b"), ("c", "d")]
    new = [
        [NewRequest(r, np.arange(3, dtype=np.int32), 3, 0, [1 + i]) for i, r in enumerate(own)]
        for own in names
    ]
    admission = [SchedulerOutput({r.req_id: 3 for r in own}, (), own) for own in new]
    slots.encode(LockstepOutput.of(admission), **IDS, seq=1)
    decode = LockstepOutput.of([SchedulerOutput(decode_req_ids=own) for own in names])
    slots.encode(decode, **IDS, seq=2)
    return slots, decode


def answer(rank: int, tokens: list[int], slots: bytes = b"\3", **fields) -> ModelRunnerOutput:
    column = np.array(tokens, "<i4").tobytes()
    return ModelRunnerOutput(
        epoch=1, seq=3, rank=rank, slots=slots, sampled_token_ids=column, **fields
    )


def test_replies_that_do_not_fit_are_refused_and_others_read_one_by_one():
    slots, decode = steady_step()
    step = slots.encode(decode, **IDS, seq=3)
    assert step.steady is not None
    for wrong in (answer(1, [1]), answer(1, [1, 2], b"\1"), answer(1, [1, 2, 3], b"\7")):
        replies = ReplicaReplies(step, 2)
        assert not replies.take(0, answer(0, [1, 2]), [])
        with pytest.raises(BadFrameError, match="columns differ"):
            replies.take(1, wrong, [])
    replies = ReplicaReplies(step, 2)
    assert not replies.take(1, answer(1, [3], num_sampled=b"\0\1"), [])
    assert replies.take(0, answer(0, [1, 2], weights_version=4), [])
    result = replies.result()
    assert (result.req_ids, result.token_ids) == (["a", "b", "d"], [1, 2, 3])
    assert (result.refused, result.weights_version) == ({"c": 1}, 4)


def test_requests_that_end_are_no_longer_among_the_steady_ones():
    slots, decode = steady_step()
    ended = [SchedulerOutput(decode_req_ids=("a", "b")), SchedulerOutput(finished_req_ids=["c"])]
    slots.encode(LockstepOutput.of(ended), **IDS, seq=3)
    with pytest.raises(InvalidSchedulerOutput, match="'c'"):
        slots.encode(decode, **IDS, seq=4)
    idle = LockstepOutput.of([SchedulerOutput(), SchedulerOutput()])
    step = slots.encode(idle, **IDS, seq=4)
    assert [decode_step(frames).scheduled for frames in step.by_replica] == [b"", b""]
    replies = ReplicaReplies(step, 2)
    replies.take(0, answer(0, [], b""), [])
    assert replies.take(1, answer(1, [], b""), [])
    assert replies.result() == StepResult([], [])

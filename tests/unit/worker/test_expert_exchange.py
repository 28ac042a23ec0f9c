"""Exchanges of experts in several batches: each rank's spare memory gets what its slots lack, and
ranks at different moves exchange nothing."""

import queue
import random
import threading
from collections import Counter, defaultdict

import pytest
import torch

from rpc_schema.errors import TransferError
from tests.support.exhaustive import seeds
from tests.support.waiting import PATIENCE_S
from worker_daemon.distributed.peer_channel import PeerMeeting
from worker_daemon.layers.expert_slots import plan_moves
from worker_daemon.worker import expert_exchange
from worker_daemon.worker.expert_exchange import ExpertExchange, ExpertMemory, SharedMove

SIZES = (24, 7)
"""Bytes of an expert in each of two parameters."""


class QueueChannel:
    """A PeerChannel between threads."""

    def __init__(self, queues, meeting):
        self._queues, self._rank = queues, meeting.rank

    def open(self, connecting):
        return None

    def exchange(self, sent, received, timeout_s):
        for peer, tensor in sent:
            self._queues[self._rank, peer].put(tensor.clone())
        for peer, tensor in received:
            try:
                found = self._queues[peer, self._rank].get(timeout=timeout_s)
            except queue.Empty:
                raise TransferError("nothing has come") from None
            assert found.shape == tensor.shape
            tensor.copy_(found)

    def abort(self):
        return None

    def leave(self):
        return None


def drawn_placement(chance, num_experts, num_ranks, size):
    """Draw a placement with every expert, and none twice on a rank."""
    while True:
        extra = chance.choices(range(num_experts), k=num_ranks * size - num_experts)
        experts = [*range(num_experts), *extra]
        chance.shuffle(experts)
        ranks = [experts[rank * size : (rank + 1) * size] for rank in range(num_ranks)]
        if all(len(set(own)) == size for own in ranks):
            return tuple(experts)


@pytest.fixture
def exchanged(monkeypatch):
    """exchanged(moves by rank, size, held by rank) -> (spare by rank, faults by rank)."""
    queues = defaultdict(queue.Queue)
    monkeypatch.setattr(
        expert_exchange, "PeerChannel", lambda meeting: QueueChannel(queues, meeting)
    )

    def run(moves, held, timeout_s=PATIENCE_S):
        spare = [[torch.zeros_like(each) for each in own] for own in held]
        ends = queue.Queue()
        for rank, move in enumerate(moves):
            meeting = PeerMeeting("test", "none", "host", 1, b"", rank, len(moves), timeout_s)
            memory = ExpertMemory(held[rank], spare[rank], None)
            exchange = ExpertExchange(
                *(move, memory, meeting, timeout_s, threading.Lock()),
                lambda fault, rank=rank: ends.put((rank, fault)),
            )
            exchange.start(threading.Lock())
        return spare, dict(ends.get(timeout=PATIENCE_S) for _ in moves)

    return run


@pytest.mark.parametrize("seed", seeds(6, of=60))
def test_spare_memory_gets_what_slots_lack(exchanged, monkeypatch, seed):
    chance = random.Random(seed)
    num_ranks, num_experts = chance.randrange(2, 5), chance.randrange(5, 20)
    size = -(-num_experts // num_ranks) + chance.randrange(2)
    before, after = (drawn_placement(chance, num_experts, num_ranks, size) for _ in range(2))
    most = chance.randrange(1, 4)
    monkeypatch.setattr(expert_exchange, "BATCH_BYTES", most * sum(SIZES) + chance.randrange(5))
    contents = [torch.randint(256, (num_experts, n), dtype=torch.uint8) for n in SIZES]
    move = SharedMove(3, plan_moves(before, after, size), size, chance.randrange(9))
    batches = list(move.batches(most))
    assert sorted(each for batch in batches for each in batch) == sorted(move.moves)
    for batch in batches:
        for slots in zip(*batch, strict=True):
            assert max(Counter(slot // size for slot in slots).values()) <= most
    own = [list(before[rank * size : (rank + 1) * size]) for rank in range(num_ranks)]
    held = [[each[experts].clone() for each in contents] for experts in own]
    spare, faults = exchanged([move] * num_ranks, held)
    assert faults == dict.fromkeys(range(num_ranks), "")
    for slot, expert in enumerate(after):
        rank, place = divmod(slot, size)
        for found, expected in zip(spare[rank], contents, strict=True):
            moved = expected[expert] if before[slot] != expert else torch.zeros_like(found[place])
            assert torch.equal(found[place], moved)


@pytest.mark.parametrize("change", ["layer", "version", "moves"])
def test_ranks_at_different_moves_exchange_nothing(exchanged, change):
    moves = plan_moves((0, 1, 2, 3), (0, 2, 1, 3), 2)
    fields = {"layer": 0, "moves": moves, "num_slots": 2, "version": 5}
    others = {"layer": 1, "moves": moves[:1], "version": 6}
    own = SharedMove(**fields)
    held = [[torch.ones((2, n), dtype=torch.uint8) for n in SIZES] for _ in range(2)]
    spare, faults = exchanged([own, SharedMove(**fields | {change: others[change]})], held)
    assert all("move other experts, or have other weights" in faults[rank] for rank in range(2))
    assert not any(each.any() for of_rank in spare for each in of_rank)

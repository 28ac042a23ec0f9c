"""Blocks that move between ranks of any two shapes: each destination's slots then hold what its own
device would have stored there, and a move that cannot be carried out changes nothing."""

import itertools
import queue
import random
import threading
import time
from collections import deque
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from msgspec import structs

from rpc_schema import kv_transfer as kt
from rpc_schema.config import RendezvousAddress
from rpc_schema.errors import ConfigError, FencedError, TransferError
from tests.support.exhaustive import seeds
from tests.support.waiting import PATIENCE_S
from worker_daemon.contracts.source_identity import SourceIdentity
from worker_daemon.runner.block_contents import BlockContents, versioned_tag
from worker_daemon.runner.connectors import peers
from worker_daemon.runner.connectors.checksums import BlockParts, PartChecksums, numbers_of
from worker_daemon.runner.connectors.peers import PeerTransfers, ShardPlace, SharedSlots

NUM_SLOTS, ROWS, WORDS, NUM_LAYERS = 9, 4, 3, 6
TAG, CPU = b"tag", torch.device("cpu")


class MemoryChannel:
    """A channel whose messages cross this process's memory."""

    def __init__(self, queues, meeting):
        self._queues, self._meeting = queues, meeting

    def open(self, meeting):
        assert not meeting.locked()

    def send(self, messages):
        for rank, tensor in messages:
            assert tensor.is_contiguous()
            self._queues[self._meeting.rank, rank].put(tensor.clone())

    def receive(self, messages):
        for rank, tensor in messages:
            try:
                found = self._queues[rank, self._meeting.rank].get(timeout=PATIENCE_S)
            except queue.Empty as error:
                raise TransferError("nothing came") from error
            assert (found.shape, found.dtype) == (tensor.shape, tensor.dtype)
            tensor.copy_(found)

    def abort(self):
        pass

    def leave(self):
        pass


class Rank:
    """One rank of a group, and its slots."""

    def __init__(self, place, num_heads):
        parts = place.parts
        self.parts, self.num_heads = parts, num_heads
        self.rows = torch.zeros(
            (NUM_SLOTS, 4 * (parts.num_words + parts.checksum_words)), dtype=torch.uint8
        )
        counts = SimpleNamespace(num_sent=0, num_received=0)
        self.tier = SimpleNamespace(arrivals=deque(), counts=counts, have_left=lambda: True)
        self.contents = BlockContents(NUM_SLOTS)
        self.weights = SimpleNamespace(version=1, identity=SourceIdentity(bytes(32)))
        slots = SharedSlots(self.rows, self.tier.arrivals, counts, lambda: True, self.contents)
        self.peers = PeerTransfers(place, slots, self.weights, threading.Lock())

    def row_of(self, words, name):
        """What this rank stores of a block, int32 [layers, ROWS, all heads, WORDS]."""
        parts = self.parts
        layers = [int(layer) for layer in parts.layers]
        heads = slice(parts.first_head, parts.first_head + parts.num_heads)
        own = words[layers][:, :, heads].reshape(1, -1)
        numbers = torch.from_numpy(numbers_of(np.frombuffer(name, np.uint8)[None]))
        sums = (PartChecksums(parts, 1, CPU).of(own) + numbers).view(torch.int32)
        return torch.cat([own, sums], dim=1)[0]

    def store(self, slot, words, name):
        self.rows.view(torch.int32)[slot] = self.row_of(words, name)
        hashes = np.frombuffer(name, np.uint8)[None]
        slots = np.array([slot], np.int32)
        self.contents.store(versioned_tag(TAG, 1), slots, hashes, 1)


class Pair:
    """Two groups, and a link between them."""

    def __init__(self, rng, monkeypatch):
        self.rng, self.num_heads = rng, 2 ** rng.randint(0, 2)
        monkeypatch.setattr(peers, "MESSAGE_BYTES", rng.choice([1, 1000, 1 << 20]))
        monkeypatch.setattr(peers, "_STORE_WAIT_S", 0.05)
        self.sources, self.destinations = (
            self._group(rng.randint(1, 3), 2 ** rng.randint(0, 3)) for _ in range(2)
        )
        numbers = range(len(self.ranks))
        queues = {pair: queue.SimpleQueue() for pair in itertools.product(numbers, repeat=2)}
        monkeypatch.setattr(peers, "PeerChannel", lambda meeting: MemoryChannel(queues, meeting))
        self.blocks = {}
        """Words and name of what each slot of the sources holds."""
        for slot in range(NUM_SLOTS):
            words = torch.randint(
                -(2**31), 2**31, (NUM_LAYERS, ROWS, self.num_heads, WORDS), dtype=torch.int64
            ).int()
            self.blocks[slot] = words, rng.randbytes(17)
            for rank in self.sources:
                rank.store(slot, *self.blocks[slot])
        self.num_moves = 0
        self.open()

    @property
    def ranks(self):
        return [*self.sources, *self.destinations]

    def _group(self, pp, tp):
        cuts = sorted(self.rng.sample(range(1, NUM_LAYERS), pp - 1))
        borders, ranks = [0, *cuts, NUM_LAYERS], []
        for stage in range(pp):
            layers = tuple(map(str, range(borders[stage], borders[stage + 1])))
            for rank in range(tp):
                first, count = rank * self.num_heads // tp, max(1, self.num_heads // tp)
                parts = BlockParts(layers, first, count, ROWS, WORDS)
                ranks.append(Rank(ShardPlace(stage, rank, "float32", parts), self.num_heads))
        return ranks

    def message(self, rank, **fields):
        made = kt.OpenKVTransfer(
            call=1,
            epoch=1,
            number=1,
            place=RendezvousAddress(host="h", port=1, secret=bytes(32)),
            rank=rank,
            sources=tuple(each.peers.shard for each in self.sources),
            destinations=tuple(each.peers.shard for each in self.destinations),
            timeout_ms=5000,
        )
        return structs.replace(made, **fields)

    def open(self):
        for number, rank in enumerate(self.ranks):
            rank.peers.open(self.message(number))

    def move(self, pairs, **fields):
        """Move blocks between pairs of slots, and return each rank's report once it has ended."""
        self.num_moves += 1
        names = b"".join(self.blocks[source][1] for source, _ in pairs)
        for rank in self.ranks:
            slots = [pair[rank not in self.sources] for pair in pairs]
            made = kt.MoveKVBlocks(
                call=1,
                epoch=1,
                number=1,
                move=self.num_moves,
                block_tag=TAG,
                hash_bytes=17,
                slots=np.array(slots, "<i4").tobytes(),
                hashes=names,
            )
            rank.peers.move(structs.replace(made, **fields))
        return [self.report(rank) for rank in self.ranks]

    def report(self, rank):
        until = time.monotonic() + PATIENCE_S
        while (found := rank.peers.report(1)).num_ended < self.num_moves:
            assert time.monotonic() < until, found
            assert found.state != "broken", found
            time.sleep(0.001)
        return found

    def close(self):
        for rank in self.ranks:
            rank.peers.close()


@pytest.fixture
def make_pair(monkeypatch):
    made = []

    def make(seed):
        made.append(Pair(random.Random(seed), monkeypatch))
        return made[-1]

    yield make
    for pair in made:
        pair.close()


@pytest.mark.parametrize("seed", seeds(8, of=100))
def test_slots_hold_what_the_ranks_own_device_would_have_stored(make_pair, seed):
    pair = make_pair(seed)
    rng, expected = pair.rng, {}
    for _ in range(4):
        count = rng.randint(1, NUM_SLOTS)
        places = [rng.sample(range(NUM_SLOTS), count) for _ in range(2)]
        moved = list(zip(*places, strict=True))
        assert all(not report.failed for report in pair.move(moved)), seed
        expected |= {target: pair.blocks[source] for source, target in moved}
        for rank in pair.destinations:
            for slot, block in expected.items():
                assert torch.equal(rank.rows.view(torch.int32)[slot], rank.row_of(*block)), seed
            arrival = rank.tier.arrivals[-1]
            assert (arrival.tag, arrival.version) == (TAG, 1)
            assert arrival.slots.tolist() == [target for _, target in moved]
            names = [pair.blocks[source][1] for source, _ in moved]
            assert [each.tobytes() for each in arrival.hashes] == names


@pytest.mark.parametrize("seed", seeds(4, of=40))
def test_a_block_that_a_source_lacks_fails_its_move_alone(make_pair, seed):
    pair = make_pair(seed)
    lacking = pair.rng.choice(pair.sources)
    lacking.contents.write(np.array([3], np.int32), 2)
    before = [rank.rows.clone() for rank in pair.destinations]
    reports = pair.move([(2, 0), (3, 1)])
    assert reports[pair.ranks.index(lacking)].failed == (1,), seed
    failed = [rank for rank in pair.destinations if pair.report(rank).failed]
    for rank, rows in zip(pair.destinations, before, strict=True):
        if rank in failed:
            assert torch.equal(rank.rows, rows), seed
            assert not rank.tier.arrivals
    assert failed or len(pair.sources) > 1, seed
    reports = pair.move([(2, 0), (4, 1)])
    assert all(2 not in report.failed for report in reports), seed
    for rank in pair.destinations:
        assert torch.equal(rank.rows.view(torch.int32)[1], rank.row_of(*pair.blocks[4])), seed


def test_weights_that_have_changed_on_one_side_send_nothing(make_pair):
    pair = make_pair(1)
    for rank in pair.destinations:
        rank.weights.identity = SourceIdentity(b"w" * 32)
    for rank, report in zip(pair.ranks, pair.move([(0, 0)]), strict=True):
        if rank in pair.destinations:
            assert report.failed == (1,)
            assert not rank.tier.arrivals


def test_what_comes_after_a_link_was_closed_is_not_kept(make_pair):
    pair = make_pair(2)
    pair.close()
    for rank in pair.ranks:
        until = time.monotonic() + 5
        while rank.peers.report(1).state != "broken":
            assert time.monotonic() < until
            time.sleep(0.001)
        assert not rank.tier.arrivals


def test_moves_and_links_out_of_order_are_refused(make_pair):
    pair = make_pair(3)
    (first, *_), shard = pair.sources, pair.sources[0].peers.shard
    slots = {"slots": np.array([0], "<i4").tobytes(), "hashes": bytes(17)}
    move = kt.MoveKVBlocks(call=1, epoch=1, number=1, move=1, block_tag=TAG, hash_bytes=17, **slots)
    for fields in ({"move": 2}, {"number": 2}):
        with pytest.raises(FencedError, match="is not the next one"):
            first.peers.move(structs.replace(move, **fields))
    for slots, said in (([NUM_SLOTS], f"slots = {NUM_SLOTS}"), ([0, 0], "named twice")):
        named = np.array(slots, "<i4").tobytes()
        with pytest.raises(ConfigError, match=said):
            first.peers.move(structs.replace(move, slots=named))
    with pytest.raises(ConfigError, match="hashes = '3 bytes'"):
        first.peers.move(structs.replace(move, hashes=b"abc"))
    with pytest.raises(FencedError, match="is not above link 1"):
        first.peers.open(pair.message(0))
    with pytest.raises(ConfigError, match="no such member"):
        first.peers.open(pair.message(99, number=2))
    changed = structs.replace(shard, first_head=shard.first_head + 1)
    others = (changed, *pair.message(0).sources[1:])
    with pytest.raises(ConfigError, match="other blocks"):
        first.peers.open(pair.message(0, number=2, sources=others))
    assert all(not report.failed for report in pair.move([(0, 0)]))
    first.peers.open(pair.message(0, epoch=2))  # of the next driver

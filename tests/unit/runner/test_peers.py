"""Blocks that move between ranks of any two shapes: each destination's slots then hold what its own
device would have stored there, and a move that cannot be carried out changes nothing."""

import itertools
import queue
import random
import threading
import time
from collections import deque
from functools import partial
from types import SimpleNamespace
from typing import NamedTuple

import numpy as np
import pytest
import torch
from msgspec import structs

from rpc_schema import kv_transfer as kt
from rpc_schema.config import RendezvousAddress
from rpc_schema.errors import ConfigError, FencedError, TransferError
from tests.support.exhaustive import seeds
from tests.support.waiting import PATIENCE_S, wait_until
from worker_daemon.contracts.source_identity import SourceIdentity
from worker_daemon.device.peer_rows import runs_of
from worker_daemon.runner.block_contents import BlockContents, versioned_tag
from worker_daemon.runner.connectors import peer_copies, peers
from worker_daemon.runner.connectors.checksums import (
    BlockParts,
    PageSection,
    PartChecksums,
    numbers_of,
)
from worker_daemon.runner.connectors.moved_bytes import MovedBytes
from worker_daemon.runner.connectors.peer_copies import SharedMemory
from worker_daemon.runner.connectors.peers import (
    OwnShard,
    PeerTransfers,
    PeerWeights,
    SharedSlots,
)
from worker_daemon.runner.connectors.pieces import pieces_of
from worker_daemon.runner.torch_blocks import TorchBlockKernels

NUM_SLOTS, NUM_CONTENTS, ROWS, WORDS, NUM_LAYERS = 30, 8, 4, 3, 6
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
            # As gloo does: a shorter message leaves the rest, and a longer one ends the process.
            whole = torch.empty(0, dtype=torch.uint8).set_(tensor.untyped_storage())
            raw = found.flatten().view(torch.uint8)
            assert len(raw) <= len(whole)
            self.num_received += tensor.dtype == torch.int32
            whole[: len(raw)] = raw

    is_lost = False
    num_received = 0
    """Messages with blocks."""

    def abort(self):
        pass

    def leave(self):
        pass


class SharedRows:
    """Rows of each rank that others may map, in this process's memory."""

    def __init__(self, rng):
        self.rows, self.rng, self.share = {}, rng, rng.choice([0.0, 0.5, 1.0])
        self.num_mapped = self.num_closed = 0

    def of(self, rows):
        """How a rank shares its rows: names them by a handle."""
        handle = (len(self.rows) + 1).to_bytes(64, "little")
        self.rows[handle] = rows
        return SharedMemory(handle, self._map)

    def _map(self, handle, num_rows, row_bytes):
        rows = self.rows[handle]
        assert rows.shape == (num_rows, row_bytes)
        if self.rng.random() >= self.share:
            raise TransferError("no such memory here")
        self.num_mapped += 1
        return SimpleNamespace(copy=partial(copy_rows, rows), close=self._close)

    def _close(self):
        self.num_closed += 1


def copy_rows(rows, sources, target, targets, columns):
    for source, place, count in runs_of(sources, targets):
        target[place : place + count, columns] = rows[source : source + count, columns]


class Contents(NamedTuple):
    """What all KV groups of a window keep of some tokens."""

    window: int
    name: bytes
    words: dict[str, torch.Tensor]
    """[ROWS, all heads, WORDS] of each layer."""


class Rank:
    """One rank of a group, and its slots."""

    def __init__(self, shard, num_pages, shared):
        own, drafts = [(num_pages, shard)], shard.drafts
        if drafts is not None:
            own.append((len(drafts.layer_names), drafts))
        self.parts = BlockParts(
            tuple(
                PageSection(count, each.first_head, each.num_heads, each.rows, each.words)
                for count, each in own
            )
        )
        self.shard = shard
        size = 4 * (self.parts.num_words + self.parts.checksum_words)
        self.rows = torch.zeros((NUM_SLOTS, size), dtype=torch.uint8)
        counts = SimpleNamespace(num_sent=0, num_received=0, num_failed=0, num_mapped=0)
        counts.sent, counts.received = MovedBytes(), MovedBytes()
        self.tier = SimpleNamespace(arrivals=deque(), counts=counts, pieces_left=lambda slots: 99)
        self.contents = BlockContents(NUM_SLOTS)
        self.weights = SimpleNamespace(version=1, identity=SourceIdentity(bytes(32)))
        drafts = SimpleNamespace(version=5, identity=SourceIdentity(b"d" * 32))
        own = self.tier.arrivals, counts, lambda slots: 99, self.contents, shared.of(self.rows)
        slots = SharedSlots(self.rows, *own)
        weights = PeerWeights(self.weights, drafts)
        self.peers = PeerTransfers(OwnShard(shard, self.parts), slots, weights, threading.Lock())

    @property
    def windows(self):
        return [group.sliding_window or 0 for group in self.shard.groups]

    def blocks_of(self, contents):
        """The KV group and the key of each block of contents."""
        own = [group for group, each in enumerate(self.windows) if each == contents.window]
        return [(group, contents.name[:-1] + bytes([group])) for group in own]

    def row_of(self, contents, group, key, unused=torch.zeros):
        """What this rank stores of a block, int32 [words and checksums]. unused: makes the words
        of pages that the block does not use."""
        first = sum(each.num_layers for each in self.shard.groups[:group])
        names = self.shard.layer_names[first : first + self.shard.groups[group].num_layers]
        pages = [self._page(contents, name, self.shard) for name in names]
        section = self.parts.sections[0]
        pages.append(unused((section.num_pages - len(names)) * section.page_words).int())
        drafts = self.shard.drafts
        if drafts is not None and group == 0:
            pages += [self._page(contents, name, drafts) for name in drafts.layer_names]
        elif drafts is not None:
            pages.append(unused(self.parts.sections[1].num_words).int())
        own = torch.cat(pages)[None]
        numbers = torch.from_numpy(numbers_of(np.frombuffer(key, np.uint8)[None]))
        checksums = PartChecksums(self.parts, TorchBlockKernels(), CPU)
        sums = torch.empty((1, checksums.count), dtype=torch.int64)
        checksums.of(own, sums)
        sums += numbers + checksums.page_numbers
        return torch.cat([own, sums.view(torch.int32)], dim=1)[0]

    def _page(self, contents, name, form):
        heads = slice(form.first_head, form.first_head + form.num_heads)
        return contents.words[name][:, heads].reshape(-1)

    def store(self, slots, contents):
        for slot, (group, key) in zip(slots, self.blocks_of(contents), strict=True):
            self.rows.view(torch.int32)[slot] = self.row_of(contents, group, key, random_words)
            hashes, own = np.frombuffer(key, np.uint8)[None], np.array([slot], np.int32)
            self.contents.store(versioned_tag(TAG, 1), own, hashes, 1)


def random_words(*shape):
    return torch.randint(-(2**31), 2**31, shape, dtype=torch.int64).int()


class Pair:
    """Two groups of one random model, and a link between them. Layers have some windows; the groups
    divide those of each window into KV groups in ways of their own."""

    def __init__(self, rng, monkeypatch, share=None, shape=None):
        """share: of the sources whose rows can be mapped. shape: (pp, tp) of both groups, which
        divide layers alike."""
        self.rng, self.num_heads = rng, 2 ** rng.randint(0, 2)
        self.shared = SharedRows(rng)
        self.shared.share = self.shared.share if share is None else share
        monkeypatch.setattr(peer_copies, "staging_rows", lambda _: rng.randint(1, 9))
        monkeypatch.setattr(peers, "MESSAGE_BYTES", rng.choice([1, 1000, 1 << 20]))
        monkeypatch.setattr(peers, "_STORE_WAIT_S", 0.05)
        windows = rng.choice([[0], [8], [0, 8], [0, 8, 20]])
        self.window_of = {f"l{i}": rng.choice(windows) for i in range(NUM_LAYERS)}
        self.drafts = tuple(f"d{i}" for i in range(rng.randint(0, 2)))
        self.draft_heads = 2 ** rng.randint(0, 2)
        if 0 not in self.window_of.values():
            self.drafts = ()
        if shape is None:
            self.sources, self.destinations = (
                self._group(rng.randint(1, 3), 2 ** rng.randint(0, 3)) for _ in range(2)
            )
        else:
            state = rng.getstate()
            self.sources = self._group(*shape)
            rng.setstate(state)
            self.destinations = self._group(*shape)
        numbers = range(len(self.ranks))
        self.queues = queues = {
            pair: queue.SimpleQueue() for pair in itertools.product(numbers, repeat=2)
        }
        monkeypatch.setattr(peers, "PeerChannel", lambda meeting: MemoryChannel(queues, meeting))
        self.contents = [self._contents() for _ in range(NUM_CONTENTS)]
        self.held = self.places(self.sources[0], self.contents)
        """The sources' slots of each of the contents."""
        for rank in self.sources:
            for slots, contents in zip(self.held, self.contents, strict=True):
                rank.store(slots, contents)
        self.num_moves = 0
        self.open()

    @property
    def ranks(self):
        return [*self.sources, *self.destinations]

    def _contents(self):
        window = self.rng.choice([*self.window_of.values()])
        words = {
            name: random_words(ROWS, self.num_heads, WORDS)
            for name, own in self.window_of.items()
            if own == window
        }
        if window == 0:
            words |= {name: random_words(2, self.draft_heads, 5) for name in self.drafts}
        return Contents(window, self.rng.randbytes(17), words)

    def places(self, rank, contents):
        """Random slots of a rank for the blocks of each of these contents."""
        free = self.rng.sample(range(NUM_SLOTS), NUM_SLOTS)
        return [[free.pop() for _ in rank.blocks_of(each)] for each in contents]

    def _group(self, pp, tp):
        rng = self.rng
        cuts = sorted(rng.sample(range(1, NUM_LAYERS), pp - 1))
        borders, ranks = [0, *cuts, NUM_LAYERS], []
        windows = sorted({*self.window_of.values()})
        num_groups = [rng.randint(1, 3) for _ in windows]
        for stage in range(pp):
            names = [f"l{i}" for i in range(borders[stage], borders[stage + 1])]
            by_group, of_group = [], []
            for window, count in zip(windows, num_groups, strict=True):
                own = [name for name in names if self.window_of[name] == window]
                ends = [0, *sorted(rng.randint(0, len(own)) for _ in range(count - 1)), len(own)]
                by_group += [own[first:end] for first, end in itertools.pairwise(ends)]
                of_group += [window or None] * count
            groups = tuple(
                kt.KVShardGroup(num_layers=len(own), sliding_window=window)
                for own, window in zip(by_group, of_group, strict=True)
            )
            for rank in range(tp):
                shard = kt.KVShard(
                    pp_rank=stage,
                    tp_rank=rank,
                    layer_names=tuple(itertools.chain(*by_group)),
                    **heads_of(self.num_heads, rank, tp),
                    rows=ROWS,
                    words=WORDS,
                    dtype="float32",
                    weights=bytes(32),
                    groups=groups,
                    drafts=self._drafts(rank, tp) if stage == pp - 1 else None,
                )
                ranks.append(Rank(shard, max(map(len, by_group)), self.shared))
        return ranks

    def _drafts(self, rank, tp):
        if not self.drafts:
            return None
        return kt.KVDraftPages(
            layer_names=self.drafts,
            **heads_of(self.draft_heads, rank, tp),
            rows=2,
            words=5,
            dtype="float32",
            weights=bytes(32),
        )

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

    def move(self, chosen, targets, **fields):
        """Move contents, by their places, to slots of the destinations, and return each rank's
        report once it has ended."""
        self.send_move(chosen, targets, **fields)
        return [self.report(rank) for rank in self.ranks]

    def send_move(self, chosen, targets, **fields):
        self.num_moves += 1
        held = [self.held[place] for place in chosen]
        for rank in self.ranks:
            columns = ([], b"", b"", b"")
            for place, own in zip(chosen, held if rank in self.sources else targets, strict=True):
                contents = self.contents[place]
                for slot, (group, key) in zip(own, rank.blocks_of(contents), strict=True):
                    columns = (
                        [*columns[0], slot],
                        columns[1] + key,
                        columns[2] + bytes([group]),
                        columns[3] + contents.name,
                    )
            made = kt.MoveKVBlocks(
                call=1,
                epoch=1,
                number=1,
                move=self.num_moves,
                block_tag=TAG,
                hash_bytes=17,
                slots=np.array(columns[0], "<i4").tobytes(),
                hashes=columns[1],
                kv_groups=columns[2],
                names=columns[3],
            )
            rank.peers.move(structs.replace(made, **fields))

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

    def make(seed, **options):
        made.append(Pair(random.Random(seed), monkeypatch, **options))
        return made[-1]

    yield make
    for pair in made:
        pair.close()


def heads_of(num_heads, rank, tp):
    return {"first_head": rank * num_heads // tp, "num_heads": max(1, num_heads // tp)}


@pytest.mark.parametrize("seed", seeds(10, of=300))
def test_slots_hold_what_the_ranks_own_device_would_have_stored(make_pair, seed):
    pair = make_pair(seed)
    rng, expected = pair.rng, {}
    for _ in range(3):
        chosen = rng.sample(range(NUM_CONTENTS), rng.randint(1, NUM_CONTENTS))
        moved = [pair.contents[place] for place in chosen]
        targets = pair.places(pair.destinations[0], moved)
        assert all(not report.failed for report in pair.move(chosen, targets)), seed
        for contents, slots in zip(moved, targets, strict=True):
            blocks = pair.destinations[0].blocks_of(contents)
            for slot, block in zip(slots, blocks, strict=True):
                expected[slot] = contents, *block
        for rank in pair.destinations:
            arrival = rank.tier.arrivals[-1]
            assert (arrival.tag, arrival.version) == (TAG, 1)
            assert arrival.slots.tolist() == [slot for own in targets for slot in own]
            keys = [key for each in moved for _, key in rank.blocks_of(each)]
            assert [each.tobytes() for each in arrival.hashes] == keys
    for rank in pair.destinations:
        for slot, block in expected.items():
            assert torch.equal(rank.rows.view(torch.int32)[slot], rank.row_of(*block)), seed


@pytest.mark.parametrize("shape", [None, (1, 1), (2, 1)])
@pytest.mark.parametrize("seed", seeds(2, of=40))
def test_blocks_are_read_from_mapped_slots(make_pair, seed, shape):
    """Groups of one shape copy whole slots. All is unmapped with the link."""
    pair = make_pair(seed, share=1.0, shape=shape)
    targets = pair.places(pair.destinations[0], pair.contents)
    assert all(not report.failed for report in pair.move(range(NUM_CONTENTS), targets)), seed
    for rank in pair.destinations:
        for contents, slots in zip(pair.contents, targets, strict=True):
            for slot, block in zip(slots, rank.blocks_of(contents), strict=True):
                found = rank.rows.view(torch.int32)[slot]
                assert torch.equal(found, rank.row_of(contents, *block)), seed
        assert rank.tier.counts.num_mapped == rank.tier.counts.num_received > 0
        assert rank.peers._link._channel.num_received == 0, seed
    for count in ("sent", "received"):
        ranks = pair.sources if count == "sent" else pair.destinations
        moved = {getattr(rank.tier.counts, count).num_bytes for rank in ranks}
        assert max(moved) > 0, seed
    assert not pair.shared.num_closed
    pair.close()
    wait_until(lambda: pair.shared.num_closed == pair.shared.num_mapped > 0, seed)


class StoringStep:
    """A step that stores what a source holds, piece by piece, while it is sent."""

    def __init__(self, rank, rng, fails=None):
        """fails: number of pieces after which it does."""
        self.rank, self.rng, self.fails = rank, rng, fails
        self.pieces, self.num_left = pieces_of(rank.parts), 0
        self.rows = rank.rows.clone().view(torch.int32)
        rank.rows.view(torch.int32)[:] = random_words(*self.rows.shape)
        rank.peers._link._slots = rank.peers._link._slots._replace(pieces_left=self.pieces_left)

    def pieces_left(self, slots):
        if self.num_left == self.fails:
            self.rank.contents.fail(0)
        elif self.num_left < len(self.pieces) and self.rng.random() < 0.3:
            piece, target = self.pieces[self.num_left], self.rank.rows.view(torch.int32)
            first = self.rank.parts.num_words
            sums = slice(first + 2 * piece.parts.start, first + 2 * piece.parts.stop)
            for columns in (piece.words, sums):
                target[:, columns] = self.rows[:, columns]
            self.num_left += 1
        return self.num_left


@pytest.mark.parametrize("share", [0.0, 0.5, 1.0])
@pytest.mark.parametrize("seed", seeds(1, of=60))
def test_pieces_move_as_steps_store_them(make_pair, monkeypatch, seed, share):
    pair = make_pair(seed, share=share, shape=random.choice([None, (1, 1), (1, 2)]))
    monkeypatch.setattr(peers, "_STORE_WAIT_S", PATIENCE_S)
    steps = [StoringStep(rank, pair.rng) for rank in pair.sources]
    targets = pair.places(pair.destinations[0], pair.contents)
    assert all(not report.failed for report in pair.move(range(NUM_CONTENTS), targets)), seed
    needed = [step for step in steps if step.rank.peers._link._members]
    assert all(step.num_left == len(step.pieces) for step in needed), seed
    for rank in pair.destinations:
        for contents, slots in zip(pair.contents, targets, strict=True):
            for slot, block in zip(slots, rank.blocks_of(contents), strict=True):
                found = rank.rows.view(torch.int32)[slot]
                assert torch.equal(found, rank.row_of(contents, *block)), seed


@pytest.mark.parametrize("share", [0.0, 1.0])
@pytest.mark.parametrize("seed", seeds(1, of=40))
def test_a_step_that_fails_between_two_pieces_fails_its_move_alone(
    make_pair, monkeypatch, seed, share
):
    pair = make_pair(seed, share=share)
    monkeypatch.setattr(peers, "_STORE_WAIT_S", 1.0)
    steps = [StoringStep(rank, pair.rng) for rank in pair.sources]
    failing = pair.rng.choice(steps)
    failing.fails = pair.rng.randrange(len(failing.pieces))
    targets = pair.places(pair.destinations[0], pair.contents)
    reports = pair.move([2, 3], targets[2:4])
    assert reports[pair.ranks.index(failing.rank)].failed == (1,), seed
    for rank in pair.destinations:
        link = rank.peers._link
        is_fed = pair.ranks.index(failing.rank) in link._members
        assert pair.report(rank).failed == ((1,) if is_fed else ()), seed
        assert bool(rank.tier.arrivals) != is_fed, seed
    for rank, step in zip(pair.sources, steps, strict=True):
        step.fails = None
        for slots, contents in zip(pair.held, pair.contents, strict=True):
            rank.store(slots, contents)
    reports = pair.move([2, 4], [targets[2], targets[4]])
    assert all(2 not in report.failed for report in reports), seed


@pytest.mark.parametrize("wrong", [-1, NUM_SLOTS, 1 << 30])
def test_slots_that_the_other_rank_does_not_have_are_not_read(make_pair, monkeypatch, wrong):
    pair = make_pair(4, share=1.0)
    listing = peers.listing_of
    named = np.array([wrong], "<i4").tobytes()
    monkeypatch.setattr(peers, "listing_of", lambda move: named + listing(move)[4:])
    pair.send_move([0, 1], pair.places(pair.destinations[0], pair.contents[:2]))
    for rank in pair.destinations:
        wait_until(lambda rank=rank: rank.peers.report(1).state == "broken", wrong)
        assert f"has {NUM_SLOTS} slots" in rank.peers.report(1).fault
        assert not rank.tier.arrivals


def test_memory_of_a_rank_that_has_gone_is_unmapped(make_pair, monkeypatch):
    monkeypatch.setattr(peers, "_LOOK_S", 0.01)
    pair = make_pair(5, share=1.0)
    for rank in pair.destinations:
        rank.peers._link._channel.is_lost = True
    wait_until(lambda: pair.shared.num_closed == pair.shared.num_mapped > 0, "unmapped")
    assert all(rank.peers.report(1).state == "broken" for rank in pair.destinations)


@pytest.mark.parametrize("seed", seeds(4, of=40))
def test_a_block_that_a_source_lacks_fails_its_move_alone(make_pair, seed):
    pair = make_pair(seed)
    lacking = pair.rng.choice(pair.sources)
    lacking.contents.write(np.array([pair.rng.choice(pair.held[3])], np.int32), 2)
    before = [rank.rows.clone() for rank in pair.destinations]
    targets = pair.places(pair.destinations[0], pair.contents)
    reports = pair.move([2, 3], targets[2:4])
    assert reports[pair.ranks.index(lacking)].failed == (1,), seed
    failed = [rank for rank in pair.destinations if pair.report(rank).failed]
    for rank, rows in zip(pair.destinations, before, strict=True):
        if rank in failed:
            assert torch.equal(rank.rows, rows), seed
            assert not rank.tier.arrivals
    assert failed or len(pair.sources) > 1, seed
    reports = pair.move([2, 4], [targets[2], targets[4]])
    assert all(2 not in report.failed for report in reports), seed
    contents = pair.contents[4]
    for rank in pair.destinations:
        for slot, block in zip(targets[4], rank.blocks_of(contents), strict=True):
            found = rank.rows.view(torch.int32)[slot]
            assert torch.equal(found, rank.row_of(contents, *block)), seed


def test_weights_that_have_changed_on_one_side_send_nothing(make_pair):
    pair = make_pair(1)
    for rank in pair.destinations:
        rank.weights.identity = SourceIdentity(b"w" * 32)
    targets = pair.places(pair.destinations[0], pair.contents[:1])
    for rank, report in zip(pair.ranks, pair.move([0], targets), strict=True):
        if rank in pair.destinations:
            assert report.failed == (1,)
            assert not rank.tier.arrivals


@pytest.mark.parametrize("seed", seeds(4, of=40))
def test_a_message_out_of_step_fits_its_buffer_and_ends_the_link(make_pair, seed):
    pair = make_pair(seed)
    destination = pair.rng.randrange(len(pair.destinations))
    peers = pair.destinations[destination].peers
    source = pair.rng.choice(peers._link._members)
    size = pair.rng.randint(1, peers._link.largest_message // 4)
    stray = torch.randint(-(2**31), 2**31, (size,), dtype=torch.int64).int()
    pair.queues[source, len(pair.sources) + destination].put(stray)
    pair.send_move([0, 1], pair.places(pair.destinations[0], pair.contents[:2]))
    until = time.monotonic() + PATIENCE_S
    while peers.report(1).state != "broken":
        assert time.monotonic() < until, seed
        time.sleep(0.001)
    assert f"member {source} are out of step" in peers.report(1).fault, seed
    assert not pair.destinations[destination].tier.arrivals


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
    many = {"slots": bytes(4) + b"\1" + bytes(3), "hashes": bytes(34)}
    for fields, said in (
        ({"hashes": b"abc"}, "hashes = '3 bytes'"),
        ({"names": b"abc"}, "names = '3 bytes'"),
        ({"kv_groups": b"\0\0"}, "kv_groups = '2 bytes'"),
        ({"kv_groups": bytes([len(first.windows)])}, f"kv_groups = {len(first.windows)}"),
    ):
        with pytest.raises(ConfigError, match=said):
            first.peers.move(structs.replace(move, **fields))
    groups = next(
        (
            own
            for window in {*first.windows}
            if len(own := [g for g, each in enumerate(first.windows) if each == window]) > 1
        ),
        None,
    )
    if groups is not None:
        names = bytes(17) + b"n" * 17
        unlike = structs.replace(move, **many, kv_groups=bytes(groups[:2]), names=names)
        with pytest.raises(ConfigError, match=f"KV group {groups[1]} has other contents"):
            first.peers.move(unlike)
    with pytest.raises(FencedError, match="is not above link 1"):
        first.peers.open(pair.message(0))
    with pytest.raises(ConfigError, match="no such member"):
        first.peers.open(pair.message(99, number=2))
    changed = structs.replace(shard, first_head=shard.first_head + 1)
    others = (changed, *pair.message(0).sources[1:])
    with pytest.raises(ConfigError, match="other blocks"):
        first.peers.open(pair.message(0, number=2, sources=others))
    targets = pair.places(pair.destinations[0], pair.contents[:1])
    assert all(not report.failed for report in pair.move([0], targets))
    first.peers.open(pair.message(0, epoch=2))  # of the next driver

"""The decoding group's side of prefill apart from decode, against a prefill group and ranks that do
anything that they may: each request is admitted once, and no slot is lost."""

import random
from types import SimpleNamespace

import pytest

from rpc_schema.config import RendezvousAddress
from rpc_schema.kv_cache import BlockGroup
from tests.support.exhaustive import seeds
from tests.support.flat_requests import flat_request
from worker_client.driver_parts import remote_prefill
from worker_client.driver_parts.remote_prefill import (
    Described,
    Ended,
    FirstToken,
    LinkLeft,
    MoveConfirmed,
    MoveToReceive,
    Opened,
    PrefillCounts,
    PromptOver,
    RemotePrefillPart,
    SlotsWanted,
)
from worker_client.errors import WorkerDied
from worker_client.group.kv_transfers import MovesReport
from worker_client.scheduler import Jump
from worker_client.scheduler.block_exchange import HostBlockExchange
from worker_client.scheduler.block_pool import BlockPool
from worker_client.scheduler.content_names import ContentNames
from worker_client.scheduler.host_tier import HostPlace
from worker_client.scheduler.outside_blocks import key_of

NUM_SLOTS, TAG, TIMEOUT_S = 40, b"tag", 10.0
PLAIN, WINDOWED = (BlockGroup(4),), (BlockGroup(4), BlockGroup(4, 8))


class ModelledRanks:
    """The transfers of the group that decodes: moves end in order, well or not."""

    def __init__(self, rng):
        self.rng, self.link, self.arrived = rng, None, set()
        self.is_calm = False

    def get_metadata(self):
        return ("shard",)

    def open(self, link, *, sends):
        assert not sends
        self.link, self.num_ended, self.moves, self.failed = link, 0, [], set()

    def move(self, link, move):
        assert link is self.link and move.number == len(self.moves) + 1
        assert len(move.blocks.slots) == len({*move.blocks.slots}) > 0
        self.moves.append(move)
        if self.sometimes(0.01):
            raise WorkerDied(0, "e", "gone")

    def poll(self, link):
        assert link is self.link
        if self.sometimes(0.3):
            return None
        for number in range(self.num_ended + 1, len(self.moves) + 1):
            if self.sometimes(0.4):
                break
            self.num_ended = number
            if self.sometimes(0.05):
                self.failed.add(number)
            else:
                self.arrived |= {*self.moves[number - 1].blocks.keys}
        fault = "broken" if self.sometimes(0.005) else ""
        return MovesReport(True, fault, self.num_ended, frozenset(self.failed))

    def close(self):
        self.link = None

    def sometimes(self, share):
        return not self.is_calm and self.rng.random() < share


class ModelledGroup:
    """A group that computes prompts, each in chunks."""

    def __init__(self, rng):
        self.rng, self.timeout_s, self.counts = rng, TIMEOUT_S, PrefillCounts()
        self.link, self.prompts, self.told, self.is_up = None, {}, [], True
        self.commands = []
        self.unconfirmed, self.confirmed = [], set()
        """Moves of the link, each with its prompt and names; names that a driver may use."""

    def describe(self):
        self.commands.append(lambda: self.tell(Described(("shard",))))

    def open_meeting(self, num_members):
        assert num_members == 2
        return RendezvousAddress(host="h", port=1, secret=bytes(32))

    def open_link(self, link):
        def opened():
            self.link, self.num_moves = link, 0
            self.unconfirmed.clear()

        self.commands.append(opened)

    def compute(self, number, request, names, sampling):
        assert sampling is not None

        def begun():
            self.prompts[number] = SimpleNamespace(left=list(names), granted=None, asked=False)

        self.commands.append(begun)

    def grant(self, link, number, names):
        def granted():
            if number not in self.prompts:
                return
            if link is not self.link:
                self.end(number)
                return
            prompt = self.prompts[number]
            assert prompt.granted is None and prompt.asked and {*names} <= {*prompt.left}
            prompt.granted = [name for name in prompt.left if name in names]

        self.commands.append(granted)

    def drop(self, number):
        self.commands.append(lambda: number in self.prompts and self.end(number))

    def news(self):
        told, self.told = self.told, []
        return told

    def await_news(self, timeout_s):
        pass

    def tell(self, news):
        self.told.append(news)

    def confirm(self):
        """Tell that the oldest move has brought what is right."""
        number, move, names = self.unconfirmed.pop(0)
        self.confirmed |= {*names}
        self.tell(MoveConfirmed(self.link.number, move, number))

    def end(self, number):
        """A prompt that was computed ends after its moves were confirmed."""
        while any(own == number for own, _, _ in self.unconfirmed) and self.rng.random() < 0.9:
            self.confirm()
        del self.prompts[number]
        if self.rng.random() < 0.5:
            is_same = self.rng.random() < 0.9
            self.tell(FirstToken(number, b"weights" if is_same else b"other", 7 + (not is_same)))
        self.tell(PromptOver(number))

    def act(self):
        """Carry out a command, or do something by itself."""
        event = self.rng.random()
        if not self.is_up:  # commands meanwhile were for the one that has ended
            self.is_up, self.prompts, self.link = True, {}, None
            self.unconfirmed.clear()
            self.commands.clear()
            self.tell(Opened())
        elif event < 0.002:
            self.is_up = False
            self.tell(Ended(None))
        elif event < 0.005 and self.link is not None:
            self.tell(LinkLeft(self.link.number))
            self.link = None
            self.unconfirmed.clear()
        elif self.commands and event < 0.6:
            self.commands.pop(0)()
        elif self.unconfirmed and event < 0.8:
            self.confirm()
        elif self.prompts:
            self.proceed(self.rng.choice([*self.prompts]))

    def proceed(self, number):
        prompt = self.prompts[number]
        if not prompt.asked and self.rng.random() < 0.9:
            prompt.asked = True
            self.tell(SlotsWanted(number, TAG if self.rng.random() < 0.95 else b"other"))
        elif self.rng.random() < 0.05 or not prompt.asked or prompt.granted == []:
            self.end(number)
        elif prompt.granted and self.link is not None:
            count = self.rng.randint(1, len(prompt.granted))
            chunk, prompt.granted = prompt.granted[:count], prompt.granted[count:]
            self.num_moves += 1
            self.tell(MoveToReceive(self.link.number, self.num_moves, number, chunk))
            self.unconfirmed.append((number, self.num_moves, chunk))


class DecodingSide:
    """The part, with a scheduler's host tier, on a clock of its own."""

    def __init__(self, seed, groups, monkeypatch):
        self.rng, self.now = random.Random(seed), 0.0
        clock = {
            "monotonic": lambda: self.now,
            "monotonic_ns": lambda: int(1e9 * self.now) + 1,
            "sleep": lambda seconds: None,
        }
        monkeypatch.setattr(remote_prefill, "time", SimpleNamespace(**clock))
        self.tier, self.keys, self.num_requests = HostPlace(NUM_SLOTS), {}, 0
        pool, names = BlockPool(8, len(groups)), ContentNames(groups, TAG)
        steps = SimpleNamespace(next=0, oldest=0, num_failures=0)
        self.exchange = HostBlockExchange(self.tier, pool, self.keys_of, names, steps)
        self.names = names
        self.prefix_tag, self.num_groups, self.held = b"prefix", len(groups), set()
        self.ranks, self.prefill = ModelledRanks(self.rng), ModelledGroup(self.rng)
        self.begun, self.gained, self.weights_key = [], [], b"weights"
        context = SimpleNamespace(group=SimpleNamespace(transfers=self.ranks), gain=self.gain)
        self.part = RemotePrefillPart(context, self, self.prefill)

    def keys_of(self, req_id, num_more):
        is_shorter = not num_more and self.num_groups == 1
        return self.keys[req_id][: -1 if is_shorter else None]

    def begin_output(self, req_id, token_id):
        assert req_id in self.held and token_id == 7
        self.begun.append(req_id)
        return Jump(1, None)

    def gain(self, gained, finished):
        self.gained += gained.req_ids

    def hold_request(self, req_id):
        self.held.add(req_id)

    def release_request(self, req_id):
        self.held.remove(req_id)

    def queue(self):
        """Queue a request; some begin alike."""
        name, first = f"r{self.num_requests}", self.rng.choice([0, 1000 * self.num_requests])
        self.num_requests += 1
        numbers = range(first, first + self.rng.randint(1, 9))
        hashes = [number.to_bytes(16, "little") for number in numbers]
        self.keys[name] = [key_of(g, each) for g in range(self.num_groups) for each in hashes]
        self.part.queued(flat_request(name, [1, 2, 3]))

    def end_one(self):
        if self.held:
            req_id = self.rng.choice(sorted(self.held))
            self.held.remove(req_id)
            self.part.ended(req_id)

    def check(self):
        """Requests can load only what has come."""
        known = {key for keys in self.keys.values() for key in keys}
        found = {key for key in known if key in self.tier}
        assert found <= self.ranks.arrived
        assert {self.names.name_of(key) for key in found} <= self.prefill.confirmed
        assert self.exchange.num_slots <= NUM_SLOTS
        assert self.ranks.link is not None or not self.exchange.num_slots


@pytest.mark.parametrize("groups", [PLAIN, WINDOWED], ids=["plain", "windowed"])
@pytest.mark.parametrize("seed", seeds(6, of=300))
def test_each_request_is_admitted_and_no_slot_is_lost(seed, groups, monkeypatch):
    side = DecodingSide(seed, groups, monkeypatch)
    for _ in range(1500):
        side.now += side.rng.choice([0.01, 0.01, 0.1])
        event = side.rng.random()
        if event < 0.04:
            side.queue()
        elif event < 0.045:
            side.end_one()
        elif event < 0.046:
            side.part.group_replaced()
        elif event < 0.6:
            side.prefill.act()
        else:
            side.part.attend()
        side.check()
        if side.rng.random() < 0.1:  # something else takes room
            side.tier.evict({1: side.rng.randbytes(17)})
            side.tier.take_moves(b"")
    side.ranks.is_calm = True
    for _ in range(400):
        side.now += 0.3
        side.prefill.act()
        side.part.attend()
    assert not side.held, seed
    assert side.exchange.num_slots == 0, seed
    counts = side.prefill.counts
    assert counts.num_blocks >= counts.num_early_blocks > 0, (seed, counts.prompts)
    assert counts.prompts["moved"] > 0, (seed, counts.prompts)
    assert side.gained == side.begun != []
    assert len({*side.begun}) == len(side.begun)

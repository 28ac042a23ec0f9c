"""The reference scheduler with host memory and files at once, over a rank that does what its steps
say: requests begin with the right contents from any mixture of places, and what is damaged costs
only a computation."""

import random
import time
from collections import deque
from types import SimpleNamespace

import pytest

from rpc_schema.identity import ContentIdentity
from rpc_schema.kv_cache import NULL_BLOCK, BlockGroup, blocks_behind
from rpc_schema.step import NO_TOKEN
from tests.support.exhaustive import seeds
from tests.support.serving import greedy_request
from worker_client.driver_parts.driver_parts import DriverParts
from worker_client.driver_parts.kv_files import kv_files_parts
from worker_client.driver_parts.live_requests import LiveRequests
from worker_client.group.kv_files import FetchProgress
from worker_client.group.weights_state import WeightsVersion
from worker_client.scheduler import Scheduler, SchedulerLimits, prefix_loads, stores_ahead
from worker_client.scheduler.outside_blocks import OutsideBlocks
from worker_client.scheduler_output import SchedulerOutput, StepResult
from worker_client.steps.block_moves import HostMoves, KVFileMoves
from worker_client.steps.cached_blocks import CachedBlocks
from worker_client.tracing.run_times import RunTimes

BLOCK = 4
VOCAB = 1000
DAMAGED = "damaged"


def token_behind(tokens, version):
    """The token that a version of the model samples behind others."""
    return random.Random(repr((version, tokens))).randrange(VOCAB)


class Rank:
    """KV cache, host memory and files: what each block has of each of its positions, which is the
    weights' version and all tokens up to there, or DAMAGED."""

    def __init__(self, rng, groups):
        self.rng, self.groups, self.version = rng, groups, 0
        self.num_slots = rng.randint(2, 8 * len(groups))
        self.blocks, self.slots, self.files, self.fetched = {}, {}, {}, {}
        self.contents = {}
        """What each key stands for."""
        self.rows = {}
        """Tokens, blocks of each group, and number of computed tokens, by request."""
        self.beside = deque()
        """Loads beside steps that have not been told of, each with the contents of its blocks, or
        {} once these are there."""
        self.launched = deque()
        """Number of each step that may still run, and the blocks that it reads or writes."""
        self.num_launched = self.num_told = 0
        self.counts = dict.fromkeys(("tier", "files", "both", "bad", "beside", "idle"), 0)

    def tell(self, result):
        """Give the driver the oldest step's result: those before it have ended if it has tokens."""
        while result.req_ids and self.launched and self.launched[0][0] < self.num_told:
            self.launched.popleft()
        self.num_told += 1
        return result

    def fetch(self, tag, hashes):
        """The group's part: some reads take their time."""
        if self.rng.random() < 0.3:
            return FetchProgress(0, is_done=False)
        there = [key in self.files for key in hashes]
        num_ready = there.index(False) if False in there else len(there)
        for key in hashes[:num_ready]:
            self.fetched[key] = self.files[key]
        return FetchProgress(num_ready, is_done=True)

    def run(self, output):
        """Do a step; return its result."""
        for req_id in (*output.finished_req_ids, *output.preempted_req_ids):
            self.rows.pop(req_id, None)
        used = [block for new in output.scheduled_new_reqs for block in new.block_ids]
        used += [b for new in output.scheduled_new_reqs for own in new.more_block_ids for b in own]
        for given in (output.new_block_ids, *output.more_new_block_ids):
            used += [block for block_ids in given.values() for block in block_ids]
        for moves in output.extensions:
            used += [*moves.stored[0], *moves.loaded[0]]
        self._await(used)
        stored = {block for moves in output.extensions for block in moves.stored[0]}
        for moves in output.extensions:
            if isinstance(moves, HostMoves) and moves.are_idle:
                loads = {*moves.loaded.block_ids}
                self.counts["idle"] += len(loads)
                assert loads and not loads & stored
                assert not any(loads & {*blocks} for blocks, _ in self.beside)
                assert not any(loads & touched for _, touched in self.launched)
        invalid = self._move(output.extensions)
        self._await(used)
        for new in output.scheduled_new_reqs:
            tables = [[*each] for each in (new.block_ids, *new.more_block_ids)]
            self.rows[new.req_id] = [new.token_ids.tolist(), tables, new.num_computed_tokens]
            for table, group in zip(tables, self.groups, strict=True):
                behind = blocks_behind(new.num_computed_tokens, group)
                assert all(b == NULL_BLOCK for b in table[:behind])
        for group, given in enumerate((output.new_block_ids, *output.more_new_block_ids)):
            for req_id, block_ids in given.items():
                self.rows[req_id][1][group] += block_ids
        counts = dict.fromkeys(output.decode_req_ids, 1) | dict(output.num_scheduled_tokens)
        touched = {*stored}
        for _, tables, first in map(self.rows.get, counts):
            for table, group in zip(tables, self.groups, strict=True):
                touched.update(table[blocks_behind(first, group) :])
        self.launched.append((self.num_launched, touched))
        self.num_launched += 1
        sampled = {req_id: self._compute(req_id, count) for req_id, count in counts.items()}
        sampled = {req_id: token for req_id, token in sampled.items() if token is not None}
        arrived = self._arrive()
        invalid += [block for block in arrived if DAMAGED in self.blocks[block]]
        return StepResult(
            [*sampled],
            [*sampled.values()],
            invalid_blocks=invalid,
            weights_version=self.version,
            arrived_blocks=arrived,
        )

    def _await(self, used):
        """Let the loads beside steps end that fill one of these blocks, and those before them."""
        last = max((n for n, load in enumerate(self.beside) if {*used} & {*load[1]}), default=-1)
        for number in range(last + 1):
            self._end(number)

    def _end(self, number):
        blocks, contents = self.beside[number]
        self.blocks.update(contents)
        self.beside[number] = blocks, {}

    def _arrive(self):
        """Tell of some loads beside steps that have ended."""
        arrived = []
        while self.beside and self.rng.random() < 0.6:
            self._end(0)
            arrived += self.beside.popleft()[0]
        return arrived

    def _move(self, extensions):
        moves = {type(each): each for each in extensions}
        host, filed = moves.get(HostMoves), moves.get(KVFileMoves)
        loads = [block for each in moves.values() for block in each.loaded.block_ids]
        assert len({*loads}) == len(loads)
        if host is not None:
            for block, slot, key in zip(*host.stored, strict=True):
                self.slots[slot] = key, self._stored(block, key)
        if filed is not None:
            for block, key in zip(*filed.stored, strict=True):
                self.files.setdefault(key, self._stored(block, key))
        if host is not None:
            assert not {*host.stored.slots} & {*host.loaded.slots}
            first_beside = len(host.loaded.slots) - host.num_beside
            beside = {}
            for place, (block, slot, key) in enumerate(zip(*host.loaded, strict=True)):
                held, content = self.slots[slot]
                assert held == key
                self.counts["tier"] += 1
                if place < first_beside:
                    self.blocks[block] = [*content]
                else:
                    self.blocks[block], beside[block] = [None] * BLOCK, [*content]
            if beside:
                self.beside.append(([*beside], beside))
                self.counts["beside"] += len(beside)
        if filed is not None:
            for block, key in zip(*filed.loaded, strict=True):
                self.blocks[block] = [*self.fetched.pop(key)]
                self.counts["files"] += 1
                if DAMAGED in self.blocks[block]:
                    self.files.pop(key, None)
            self.counts["both"] += bool(host is not None and host.loaded[0] and filed.loaded[0])
        bad = [block for block in loads if DAMAGED in self.blocks[block]]
        self.counts["bad"] += len(bad)
        return bad

    def _stored(self, block, key):
        """The contents that a block loses, which are those of its key."""
        content = [*self.blocks[block]]
        if DAMAGED not in content:  # it was loaded like that, and its requests have not told yet
            assert None not in content
            assert self.contents.setdefault(key, content) == content
        return content

    def _compute(self, req_id, count):
        """Compute tokens of a request; return the sampled one, if there is one."""
        tokens, tables, first = row = self.rows[req_id]
        is_damaged = False
        for table, group in zip(tables, self.groups, strict=True):
            for at in range(blocks_behind(first, group) * BLOCK, first):
                found = self.blocks[table[at // BLOCK]][at % BLOCK]
                is_damaged |= found == DAMAGED
                assert found in (DAMAGED, (self.version, *tokens[: at + 1])), (req_id, at)
        for at in range(first, first + count):
            known = DAMAGED if is_damaged else (self.version, *tokens[: at + 1])
            for table in tables:
                if table[at // BLOCK] != NULL_BLOCK:
                    if at % BLOCK == 0:
                        self.blocks[table[at // BLOCK]] = [None] * BLOCK
                    self.blocks[table[at // BLOCK]][at % BLOCK] = known
        row[2] = first + count
        if row[2] < len(tokens):
            return None
        token = NO_TOKEN if is_damaged else token_behind(tokens, self.version)
        tokens.append(token)
        return token

    def damage(self):
        """Change a slot, a file, or what was read of one."""
        place = self.rng.choice([self.slots, self.files, self.fetched])
        if place:
            at = self.rng.choice(sorted(place))
            if place is self.slots:
                place[at] = place[at][0], [DAMAGED] * BLOCK
            else:
                place[at] = [DAMAGED] * BLOCK

    def lose(self):
        """Remove a file, as for want of room."""
        if self.files:
            del self.files[self.rng.choice(sorted(self.files))]

    @property
    def held(self):
        """The slots, as a new driver finds them."""
        slots = sorted(self.slots)
        return CachedBlocks.of(slots, [self.slots[slot][0] for slot in slots])


def use_weights(rank, scheduler):
    """Tell a scheduler of the weights of now."""
    identity = ContentIdentity(content=b"weights")
    scheduler.use_weights(WeightsVersion(rank.version, identity))


def new_driver(rank, num_blocks, **fields):
    """A scheduler, its requests and its part for files."""
    limits = SchedulerLimits(
        max_num_seqs=4,
        max_num_batched_tokens=24,
        max_model_len=64,
        num_blocks=num_blocks,
        block_size=BLOCK,
        groups=rank.groups,
        num_host_blocks=rank.num_slots,
        has_kv_files=True,
        max_stored_ahead=rank.rng.choice([0, 1, 4]),
        pipeline_parallel_size=rank.rng.choice([1, 2]),
        **fields,
    )
    scheduler = Scheduler(limits)
    use_weights(rank, scheduler)
    scheduler.restore_host_tier(rank.held)
    requests = LiveRequests(scheduler, RunTimes(None))
    context = SimpleNamespace(
        group=SimpleNamespace(kv_files=rank), scheduler=scheduler, requests=requests
    )
    (part,) = kv_files_parts(context)
    requests.serve_with(DriverParts([part]))
    return scheduler, requests, part


def run(rng, rank, scheduler, part, trouble=0.2):
    """Run all requests, with several steps in flight; return their outputs. trouble: chance that
    something is damaged or removed before a step."""
    in_flight, outputs = deque(), {}
    while scheduler.has_unfinished_requests():
        if rng.random() < trouble:
            rng.choice([rank.damage, rank.lose])()
        part.attend()
        step = scheduler.schedule() if len(in_flight) < 3 else None
        if step is not None:
            in_flight.append((step, rank.run(step)))
        if in_flight and (step is None or rng.random() < 0.5):
            sent, result = in_flight.popleft()
            done = scheduler.update_from_output(sent, rank.tell(result))
            outputs |= {output.req_id: output for output in done}
    for sent, result in in_flight:
        scheduler.update_from_output(sent, rank.tell(result))
    return outputs


KINDS = {
    "plain": (BlockGroup(BLOCK),),
    "windows": (BlockGroup(BLOCK), BlockGroup(BLOCK, 9), BlockGroup(BLOCK, 9)),
}


@pytest.mark.parametrize("least_beside", [1, prefix_loads.LEAST_BLOCKS])
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("seed", seeds(5, of=1000))
def test_requests_begin_with_what_they_need_from_any_mixture_of_places(
    seed, kind, least_beside, monkeypatch
):
    monkeypatch.setattr(prefix_loads, "LEAST_BLOCKS", least_beside)
    for name in ("POOL_DIVISOR", "SLOTS_DIVISOR"):
        monkeypatch.setattr(stores_ahead, name, 2)
    rng = random.Random(seed)
    rank = Rank(rng, KINDS[kind])
    stems = [[rng.randrange(VOCAB) for _ in range(rng.randint(8, 30))] for _ in range(4)]
    for driver in range(3):
        num_blocks = rng.randint(16, 24) * len(rank.groups)
        scheduler, requests, part = new_driver(rank, num_blocks)
        for wave in range(12):
            wanted = {}
            for number in range(rng.randint(1, 5)):
                tail = [rng.randrange(VOCAB) for _ in range(rng.randint(1, 6))]
                prompt = [*rng.choice(stems), *tail]
                name = f"{driver}-{wave}-{number}"
                wanted[name] = tokens = [*prompt]
                request = greedy_request(name, prompt, rng.randint(1, 9))
                requests.add(request)
                for _ in range(request.max_tokens):
                    tokens.append(token_behind(tokens, rank.version))
                wanted[name] = tokens[len(prompt) :]
            outputs = run(rng, rank, scheduler, part)
            assert {name: out.token_ids for name, out in outputs.items()} == wanted, seed
            assert scheduler.num_free_blocks == num_blocks - 1, seed
            if rng.random() < 0.1:
                rank.version += 1
                rank.slots.clear()
                use_weights(rank, scheduler)
            if rng.random() < 0.2:  # a daemon is replaced
                part.group_replaced()
                rank.fetched.clear()
                scheduler.forget_prefixes()
                if rng.random() < 0.5:
                    scheduler.forget_host_tier()
                    rank.slots.clear()
        rank.fetched.clear()
    assert not rank.counts["beside"] or least_beside == 1
    assert rank.counts["idle"] <= rank.counts["tier"]
    assert rank.counts["beside"] or least_beside > 1 or seed > 4 or rank.num_slots < 6, seed
    assert rank.counts["files"] and (rank.counts["tier"] or rank.num_slots < 6), (seed, rank.counts)


@pytest.mark.parametrize("seed", seeds(3, of=200))
def test_a_block_that_is_taken_again_before_its_step_has_one_load_and_no_contents(seed):
    rng = random.Random(seed)
    num_blocks, keys = 6, [b"%d" % number for number in range(12)]
    limits = SchedulerLimits(4, 24, 64, 32, BLOCK, num_host_blocks=5, has_kv_files=True)
    outside, blocks, slots, fetched = OutsideBlocks(limits), {}, {}, set()
    num_taken_again = 0
    for _ in range(200):
        if rng.random() < 0.5:
            fetched.update(found := rng.sample(keys, 2))
            outside.note_fetched(found)
        planned = dict(blocks)
        loads = []
        for block in rng.choices(range(num_blocks), k=rng.randint(1, 5)):
            if block in planned:  # as the pool does, which has the contents that are to come too
                outside.evict({block: planned.pop(block)})
            if there := sorted(outside.held(keys) - {*planned.values()}):
                planned[block] = key = rng.choice(there)
                outside.keep([key])
                outside.load({block: key})
                num_taken_again += block in loads
                loads.append(block)
        if rng.random() < 0.1:
            outside.fail([SchedulerOutput()])
            outside.forget_all()
            fetched.clear()
            continue
        moves = {type(each): each for each in outside.take_moves(b"tag")}
        host, filed = moves.get(HostMoves, HostMoves(b"tag")), moves.get(KVFileMoves)
        loaded = [*host.loaded.block_ids, *(filed.loaded.block_ids if filed else ())]
        assert sorted(loaded) == sorted({*loads}), seed
        for block, slot, key in zip(*host.stored, strict=True):
            assert blocks[block] == key, seed
            slots[slot] = key
        for block, slot, key in zip(*host.loaded, strict=True):
            assert slots[slot] == key, seed
            blocks[block] = key
        for block, key in zip(*filed.loaded, strict=True) if filed else ():
            fetched.remove(key)
            blocks[block] = key
        for block in range(num_blocks):
            if block not in planned:
                blocks[block] = b"%d" % rng.randrange(len(keys))
            assert blocks[block] == planned.get(block, blocks[block]), seed
    assert num_taken_again, seed


def test_what_is_in_host_memory_is_not_fetched_and_outlives_a_lost_fetch():
    rank = Rank(random.Random(1), KINDS["plain"])
    scheduler, requests, part = new_driver(rank, 24)
    prompt = [*range(1, 22)]
    scheduler.add_request(greedy_request("a", prompt, 1))
    ((*own, last),) = scheduler.lacking_blocks("a", windowed=False)
    scheduler.abort_request("a")
    scheduler.restore_host_tier(CachedBlocks.of([0, 1], [own[0], own[2]]))
    rank.slots = {slot: (key, None) for slot, key in enumerate((own[0], own[2]))}
    rank.files = dict.fromkeys((own[1], own[3], last))
    requests.add(greedy_request("a", prompt, 1))
    assert scheduler.exchange.num_slots == 2
    requests.abort("a")
    assert scheduler.exchange.num_slots == 0
    requests.add(greedy_request("a", prompt, 1))
    while part.wait():
        part.attend()
    assert [*rank.fetched] == [own[1], own[3], last]
    assert scheduler.exchange.num_slots == 0  # none is kept for the request any more
    part.group_replaced()
    (new,) = scheduler.schedule().scheduled_new_reqs
    assert new.num_computed_tokens == BLOCK


def test_what_only_host_memory_has_goes_to_files_once_a_token_was_sampled_behind_it():
    """As it may be from another group, or of a time without files."""
    rng = random.Random(1)
    rank, prompt = Rank(rng, KINDS["plain"]), [*range(1, 14)]
    for _ in range(2):
        scheduler, requests, part = new_driver(rank, 24)
        for name in ("a", "b"):  # the steps of the second one store what the first one has
            requests.add(greedy_request(name, prompt, 1))
            run(rng, rank, scheduler, part, trouble=0)
        assert len(rank.files) == 3
        rank.slots = dict(enumerate(rank.files.items()))
        rank.files = {}
    assert rank.counts["tier"] == 3 and rank.counts["files"] == 0


def test_a_request_comes_back_though_others_have_taken_the_blocks_that_it_loads():
    """A pool that is short of blocks gives them to a request that loads into them with its own
    step: nobody will tell that they have arrived."""
    outside = OutsideBlocks(SchedulerLimits(4, 24, 64, 32, BLOCK, num_host_blocks=5))
    outside.restore_tier(CachedBlocks.of([0, 1], [b"first", b"other"]))
    released = []
    queues = SimpleNamespace(running={"other"}, load=lambda request: None, end_load=released.append)

    def load(request, prefix):
        outside.load({7: b"first"})
        return [7]

    blocks = SimpleNamespace(num_in_host_memory=lambda *_: prefix_loads.LEAST_BLOCKS, load=load)
    loads = prefix_loads.PrefixLoads(outside, queues, blocks, time.monotonic)
    request = SimpleNamespace(id="a", blocks=SimpleNamespace(were_loaded=False))
    assert loads.begin(request, None)
    loads.end_arrived(1)
    assert loads.is_loading and not released
    outside.load({7: b"other"})
    (moves,) = outside.take_moves(b"tag")
    assert moves.num_beside == 0 and moves.loaded.hashes == (b"other",)
    loads.end_arrived(1)
    assert not loads.is_loading and released == ["a"]

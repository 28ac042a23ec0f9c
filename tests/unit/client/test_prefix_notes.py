"""The driver's side of a prefix cache that outlives it: what the scheduler reports and takes back,
and when the driver notes it."""

import random
from dataclasses import replace

import numpy as np
import pytest

from rpc_schema.identity import ContentIdentity
from tests.support.fake_daemon import EOS, VOCAB_SIZE, reference_tokens
from tests.unit.client.conftest import worker_config
from worker_client.driver import Driver
from worker_client.driver_parts.kept_prefixes import NOTE_INTERVAL, KeptPrefixes
from worker_client.group.adoption import AdoptedRequest
from worker_client.group.weights_state import WeightsVersion
from worker_client.requests import GenerationRequest, SamplingParams
from worker_client.scheduler import Scheduler, SchedulerLimits
from worker_client.scheduler_output import StepResult
from worker_client.steps.cached_blocks import NO_CACHED_BLOCKS, CachedBlocks

LIMITS = SchedulerLimits(
    max_num_seqs=8,
    max_num_batched_tokens=64,
    max_model_len=128,
    num_blocks=64,
    block_size=4,
    eos_token_ids=(EOS,),
)


def request(name, tokens, max_tokens=8):
    return GenerationRequest(
        id=name,
        prompt=np.array(tokens, np.int32),
        max_tokens=max_tokens,
        sampling=SamplingParams(ignore_eos=True),
    )


def run(scheduler, on_step=lambda output: None):
    """Run all requests, with the tokens 0, 1, 2, ...; return the outputs by id."""
    done = {}
    while scheduler.has_unfinished_requests():
        output = scheduler.schedule()
        on_step(output)
        running = [*output.num_scheduled_tokens, *output.decode_req_ids]
        ready = [name for name in running if is_ready(scheduler, name)]
        result = StepResult(ready, [7] * len(ready))
        done |= {out.req_id: out for out in scheduler.update_from_output(output, result)}
    return done


def is_ready(scheduler, name):
    entry = scheduler._queues.unfinished[name]
    return entry.num_computed >= len(entry.tokens)


def news_of(scheduler):
    changes = scheduler.take_cached_changes()
    hashes = map(bytes, changes.cached.hashes)
    return dict(zip(changes.cached.block_ids.tolist(), hashes, strict=True))


def filled(tokens, max_tokens=8):
    """A scheduler that has served one request, and what it has cached."""
    scheduler = Scheduler(LIMITS)
    scheduler.add_request(request("a", tokens, max_tokens))
    run(scheduler)
    return scheduler, news_of(scheduler)


def blocks_of(known):
    return CachedBlocks.of(list(known), list(known.values()))


def test_restored_blocks_are_found_by_the_same_tokens_alone():
    rng = random.Random(1)
    tokens = [rng.randrange(VOCAB_SIZE) for _ in range(30)]
    first, known = filled(tokens)
    assert len(known) == (30 + 8 - 1) // 4 and news_of(first) == {}
    second = Scheduler(LIMITS)
    assert second.prefix_tag == first.prefix_tag
    assert second.restore_prefixes(blocks_of(known)) == len(known)
    assert second.num_free_blocks == LIMITS.num_blocks - 1
    second.add_request(request("same", tokens))
    second.add_request(request("half", [*tokens[:17], *[1] * 10]))
    second.add_request(request("other", [tokens[0] ^ 1, *tokens[1:]]))
    admitted = []
    outputs = run(second, lambda output: admitted.extend(output.scheduled_new_reqs))
    cached = {name: output.num_cached_tokens for name, output in outputs.items()}
    assert cached == {"same": 28, "half": 16, "other": 0}
    by_name = {new.req_id: new for new in admitted}
    by_hash = sorted(known)
    assert list(by_name["same"].block_ids[:7]) == by_hash[:7]
    assert by_name["same"].num_computed_tokens == 28
    new = news_of(second)
    assert new and not new.keys() & set(by_hash[:7]), "those are noted already"


def weights(number, content=b"a"):
    return WeightsVersion(number, ContentIdentity(content=content * 32))


def num_cached(scheduler, tokens):
    scheduler.add_request(request("a", tokens))
    return run(scheduler)["a"].num_cached_tokens


def test_blocks_of_other_weights_never_match():
    tokens = list(range(30))
    first = Scheduler(LIMITS)
    first.use_weights(weights(3))
    assert num_cached(first, tokens) == 0
    known = news_of(first)
    for version, count in (
        (weights(3), 28),
        (weights(4), 0),
        (weights(3, b"b"), 0),
    ):
        second = Scheduler(LIMITS)
        second.use_weights(version)
        assert second.restore_prefixes(blocks_of(known)) == len(known)
        assert num_cached(second, tokens) == count
    first.use_weights(weights(3))
    assert num_cached(first, tokens) == 28
    first.add_request(request("lost", [*tokens[:20], 9]))
    output = first.schedule()
    assert output.scheduled_new_reqs[0].num_computed_tokens == 20
    first.use_weights(weights(4))
    first.step_failed([output], frozenset(["lost"]))
    again = []
    run(first, lambda output: again.extend(output.scheduled_new_reqs))
    assert [new.num_computed_tokens for new in again] == [0]
    assert num_cached(first, tokens) == 20, "of the blocks that the lost one has filled anew"
    first.use_weights(weights(5))
    assert num_cached(first, tokens) == 0


@pytest.mark.parametrize("change", [{"block_size": 8}, {"groups": None}])
def test_other_blocks_have_other_tags(change):
    if change == {"groups": None}:
        change = {"groups": tuple(replace(LIMITS).block_groups) * 2}
    assert Scheduler(replace(LIMITS, **change)).prefix_tag != Scheduler(LIMITS).prefix_tag


def test_blocks_in_use_or_without_caching_are_not_restored():
    tokens = list(range(30))
    _, known = filled(tokens)
    without = Scheduler(replace(LIMITS, enable_prefix_caching=False))
    assert without.restore_prefixes(blocks_of(known)) == 0
    busy = Scheduler(LIMITS)
    busy.add_request(request("b", [9] * 10))
    output = busy.schedule()
    held = set(output.scheduled_new_reqs[0].block_ids)
    assert busy.restore_prefixes(blocks_of(known)) == len(known.keys() - held) < len(known)
    assert busy.restore_prefixes(NO_CACHED_BLOCKS) == 0


def test_restored_blocks_are_reused_last_and_forgotten_then():
    tokens = list(range(30))
    _, known = filled(tokens)
    scheduler = Scheduler(LIMITS)
    scheduler.restore_prefixes(blocks_of(known))
    scheduler.add_request(request("b", [9] * 110))
    scheduler.add_request(request("c", [8] * 60))
    scheduler.add_request(request("a", tokens))
    assert run(scheduler)["a"].num_cached_tokens == 28
    for name in ("d", "e", "f"):
        scheduler.add_request(request(name, [ord(name)] * 110))
    run(scheduler)
    scheduler.add_request(request("a", tokens))
    assert run(scheduler)["a"].num_cached_tokens < 28


def test_block_that_an_adopted_request_still_fills_is_not_shared():
    tokens = list(range(30))
    _, known = filled(tokens)
    blocks = sorted(known)
    scheduler = Scheduler(LIMITS)
    scheduler.restore_prefixes(blocks_of(known))
    notes = []
    other = Scheduler(LIMITS)
    other.add_request(request("a", tokens))
    notes.append(other.schedule().scheduled_new_reqs[0].note)
    adopted = AdoptedRequest(
        req_id="a",
        token_ids=np.array([*tokens, 7, 7], np.int32),
        num_prompt_tokens=30,
        num_computed_tokens=26,
        block_ids=tuple(blocks[:7]),
        extensions=(),
        note=notes[0],
        slot=0,
    )
    assert scheduler.adopt_requests([adopted]) == []
    scheduler.add_request(request("b", tokens))
    output = scheduler.schedule()
    by_name = {new.req_id: new for new in output.scheduled_new_reqs}
    assert by_name["b"].num_computed_tokens == 24
    assert not set(by_name["b"].block_ids[6:]) & set(by_name["a"].block_ids[6:])


class Future:
    def __init__(self, number):
        self.number = number


class Group:
    """Takes notes, unless it is busy."""

    def __init__(self):
        self.notes = []
        self.busy = False
        self.prefixes = self

    def note(self, tag, blocks, after, *, distrusted=()):
        if self.busy:
            return False
        self.notes.append((blocks.block_ids.tolist(), after.number, list(distrusted)))
        return True

    def get(self, tag):
        return NO_CACHED_BLOCKS


class Changes:
    def __init__(self, *block_ids, distrusted=()):
        self.cached = CachedBlocks.of(block_ids, [bytes((i,)) for i in block_ids])
        self.distrusted = list(distrusted)


class Reporting:
    """A scheduler with changes."""

    prefix_tag = b"t"

    def __init__(self, *changes):
        self.changes = list(changes)

    def restore_prefixes(self, blocks):
        return 0

    def take_cached_changes(self):
        return self.changes.pop(0) if self.changes else Changes()


def test_blocks_are_noted_as_of_the_step_at_which_they_were_collected_once_that_is_done():
    group = Group()
    kept = KeptPrefixes(group, Reporting(Changes(1, 2), Changes(3, distrusted=[2]), Changes(4)))
    assert kept.due == NOTE_INTERVAL
    kept.proceed(20, 18, Future(20))
    assert (group.notes, kept.due) == ([], 20 + NOTE_INTERVAL)
    kept.proceed(36, 34, Future(36))
    assert group.notes == [([1, 2], 20, [])]
    group.busy = True
    kept.proceed(52, 50, Future(52))
    group.busy = False
    kept.proceed(68, 66, Future(68))
    assert group.notes[1:] == [([3], 36, [2])]
    kept.forget()
    kept.proceed(70, 70, Future(70))
    assert len(group.notes) == 2, "its steps have failed"


def test_all_is_noted_at_once_when_nothing_is_in_flight():
    group = Group()
    kept = KeptPrefixes(group, Reporting(Changes(1), Changes(2)))
    kept.proceed(20, 18, Future(20))
    kept.proceed(22, 22, Future(22))
    assert group.notes == [([1], 20, []), ([2], 22, [])]


def test_other_schedulers_and_groups_note_nothing():
    for kept in (KeptPrefixes(Group(), object()), KeptPrefixes(object(), Reporting(Changes(1)))):
        kept.restore()
        kept.proceed(20, 20, Future(20))
        assert kept.due > 10**12


def test_next_driver_of_a_group_without_notes_begins_cold(fakes, connect):
    """Fake daemons know no notes: nothing is lost but the cache."""
    daemons = fakes(1)
    group = connect(daemons, 1)
    group.attach()
    group.prepare(worker_config(1, max_model_len=128), num_gpu_blocks=64)
    for _ in range(2):
        driver = Driver(group, Scheduler(LIMITS))
        driver.add_request(request("a", [1, 2, 3, 4, 5, 6], max_tokens=5))
        (output,) = driver.run()
        assert output.num_cached_tokens == 0
        assert output.token_ids == reference_tokens([1, 2, 3, 4, 5, 6], 5, frozenset())

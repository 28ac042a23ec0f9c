"""Host memory and files at once: requests whose prompts lie in the KV cache, in host memory and in
files get the same tokens as ones that compute them, whatever became of any of these."""

import random
from collections import Counter
from contextlib import suppress
from dataclasses import dataclass, field, replace

import pytest

from rpc_schema.errors import ConfigError
from tests.support.checkpoints import NearTie, prompts
from tests.support.exhaustive import exhaustively
from tests.support.filing_daemons import HEADER_BYTES, FilingDaemons, settled
from tests.support.prefill_pairs import Prompts, prefill_pair, run
from tests.support.secured import ask
from tests.support.serving import connect, drafts_by, greedy_request, kill_and_wait, worker_config
from tests.support.tier_damage import TierFile
from tests.support.tiered_waves import (
    NUM_GPU_BLOCKS,
    Waves,
    assert_right,
    new_driver,
    num_loaded,
    run_waves,
    tiers,
)
from tests.support.tmpfs import tmpfs_directory
from tests.support.window_models import MODELS, WINDOW
from worker_client.errors import InvalidSchedulerOutput, KVPlanError
from worker_client.scheduler_output import SchedulerOutput
from worker_client.steps.block_moves import HashedBlocks, HostMoves, KVFileMoves, MovedBlocks
from worker_client.wire.keys import NO_KEYS

HOST_BYTES = 1 << 15
CONFIG = {
    "kv_files": True,
    "kv_host_memory_bytes": HOST_BYTES,
    "max_model_len": 96,
    "max_num_batched_tokens": 32,
}
"""A tier of fewer blocks than the requests have."""


@pytest.fixture(scope="module")
def keeping(model_root, tmp_path_factory):
    """Two daemons that keep files, and leave their host memory to their successors."""
    directory = tmp_path_factory.mktemp("filed")
    with (
        tmpfs_directory() as host,
        FilingDaemons(2, model_root, directory, host_directory=host) as daemons,
    ):
        daemons.tiers = [host / str(rank) for rank in range(2)]
        yield daemons


def serving(keeping, model, pp=1, tp=1, *, num_gpu_blocks=NUM_GPU_BLOCKS, reload=True, **config):
    wanted = worker_config(model.path, pp, tp, **{**CONFIG, **config})
    endpoints = keeping.endpoints[: pp * tp]
    return connect(endpoints, wanted, num_gpu_blocks=num_gpu_blocks, reload=reload)


@dataclass
class Loads:
    """Where the blocks of new requests come from, by request, when they begin first; and how often
    each has begun."""

    found: dict[str, dict[str, int]] = field(default_factory=dict)
    num_begun: Counter = field(default_factory=Counter)

    def watch(self, scheduler):
        schedule = scheduler.schedule

        def watched():
            output = schedule()
            for new in () if output is None else output.scheduled_new_reqs:
                self._note(new, {type(each): each for each in output.extensions})
            return output

        scheduler.schedule = watched

    def _note(self, new, moves):
        begun = {*new.block_ids[: new.num_computed_tokens // 4]}
        loaded = {
            name: begun & {*(moves[kind].loaded.block_ids if kind in moves else ())}
            for name, kind in (("tier", HostMoves), ("files", KVFileMoves))
        }
        counts = {name: len(own) for name, own in loaded.items()}
        counts["device"] = len(begun) - sum(counts.values())
        self.found.setdefault(new.req_id, counts)
        self.num_begun[new.req_id] += 1


@pytest.mark.parametrize("damages", [False, True], ids=["whole", "damaged"])
@pytest.mark.parametrize(("pp", "tp"), [(1, 1), exhaustively(2, 1), exhaustively(1, 2)])
def test_a_prefix_in_three_places_gives_the_same_tokens(keeping, checkpoint, pp, tp, damages):
    """Its first blocks are in the KV cache, the next ones in host memory, the last ones in files
    alone. A bit of the second, and one of the third, change."""
    model = checkpoint()
    stem, other, sent = clear_requests(model, random.randrange(1 << 30))
    config = {"num_gpu_blocks": 32, "kv_host_memory_bytes": HOST_BYTES // (pp * tp)}
    with serving(keeping, model, pp, tp, **config) as (group, loaded):
        assert loaded.num_host_blocks == 8
        driver, loads, outputs = new_driver(group, loaded), Loads(), {}
        run_waves(driver, [[greedy_request("first", stem, 4)]])
        driver.add_request(sent[1])
        driver.step()
        driver.add_request(greedy_request("evicting", other, 4))
        while "evicting" not in outputs:
            outputs |= {output.req_id: output for output in driver.step()}
        files_before, tiers_before = settled(group), tiers(group)
        if damages:
            for path in keeping.tiers[: pp * tp]:
                flip_slots(path, loaded.num_host_blocks)
            for path in keeping.files:
                flip_block(path)
        loads.watch(driver.scheduler)
        outputs |= run_waves(driver, [sent[:1]])
        files_after, tiers_after = settled(group), tiers(group)
        assert driver.scheduler.num_free_blocks == loaded.num_blocks - 1
        assert loads.num_begun["unconcerned"] == 0
    expected = {each.id: model.greedy(each.prompt.tolist(), each.max_tokens) for each in sent}
    assert {name: outputs[name].token_ids for name in expected} == expected
    assert all(loads.found["mixed"].values()), loads.found
    assert sum(loads.found["mixed"].values()) == len(stem) // 4
    for before, after in ((files_before, files_after), (tiers_before, tiers_after)):
        num_invalid = [b.num_invalid - a.num_invalid for a, b in zip(before, after, strict=True)]
        assert all(num_invalid) if damages else not any(num_invalid), (before, after)
    if not damages:
        assert outputs["mixed"].num_cached_tokens == len(stem)
        num_outside = loads.found["mixed"]["tier"] + loads.found["mixed"]["files"]
        assert outputs["mixed"].num_loaded_tokens == 4 * num_outside


def clear_requests(model, seed):
    """A stem, another prompt, and two requests without near ties, of which one has the stem."""
    rng = random.Random(seed)
    while True:
        print("seed", seed := rng.randrange(1 << 30))
        stem, other, tail, own = (each.tolist() for each in prompts(seed, [60, 70, 5, 17]))
        sent = [greedy_request("mixed", stem + tail, 6), greedy_request("unconcerned", own, 30)]
        with suppress(NearTie):
            for each in sent:
                model.greedy(each.prompt.tolist(), each.max_tokens)
            return stem, other, sent


def flip_block(path):
    """Change a bit of a block in its file."""
    raw = bytearray(path.read_bytes())
    raw[HEADER_BYTES + len(raw) // 2] ^= 1
    path.write_bytes(raw)


def flip_slots(directory, num_slots):
    """Change a bit of every slot."""
    tier, rng = TierFile(directory, num_slots), random.Random(1)
    for slot in range(num_slots):
        tier.damage(rng, "flip", [slot])


KINDS = {
    "windows": (
        {**MODELS["mixed"], "sliding_window": WINDOW, "seed": 22},
        {"num_gpu_blocks": 150, "kv_host_memory_bytes": 4 * HOST_BYTES},
    ),
    "drafted": ({}, {"speculative": "draft_model", "num_gpu_blocks": 56}),
    "preempted": ({}, {"num_gpu_blocks": 27}),
}
"""Fields of the checkpoint, and of the configuration."""


@pytest.mark.parametrize(
    ("kind", "pp", "tp"),
    [
        ("windows", 1, 1),
        *(exhaustively(kind, 1, 1) for kind in KINDS if kind != "windows"),
        *(exhaustively(kind, *shape) for kind in KINDS for shape in ((2, 1), (1, 2))),
    ],
)
def test_the_next_driver_and_the_next_daemons_load_from_both(keeping, checkpoint, kind, pp, tp):
    fields, config = KINDS[kind]
    waves, model = Waves(random.randrange(1 << 30)), checkpoint(**fields)
    print("seed", waves.seed)
    if kind == "drafted":
        config = {**config, "speculative": drafts_by("draft_model", model.path)}
    with serving(keeping, model, pp, tp, **config) as (group, loaded):
        outputs = run_waves(new_driver(group, loaded), waves.requests)
        settled(group)
    assert_right(outputs, model, waves)
    num_from = Counter()
    for reload in (False, True):
        if reload:
            keeping.kill()
        with serving(keeping, model, pp, tp, reload=reload, **config) as (group, loaded):
            before, files_before = tiers(group), settled(group)
            outputs = run_waves(new_driver(group, loaded), waves.requests)
            after, files_after = tiers(group), settled(group)
        assert_right(outputs, model, waves)
        assert all(tier.num_held > 0 for tier in before), before
        found = {"tier": (before, after), "files": (files_before, files_after)}
        for place, (olds, news) in found.items():
            for old, new in zip(olds, news, strict=True):
                assert new.num_invalid == old.num_invalid
                num_from[place] += new.num_loaded - old.num_loaded
        assert all(each.num_bad_files == 0 for each in files_after)
    assert num_from["tier"] > 0 < num_from["files"], num_from


@pytest.mark.exhaustive
def test_blocks_of_other_weights_never_match(keeping, models):
    waves = Waves(random.randrange(1 << 30))
    print("seed", waves.seed)
    old, new, _ = models
    with serving(keeping, old) as (group, loaded):
        driver = new_driver(group, loaded)
        assert_right(run_waves(driver, waves.requests), old, waves)
        group.weights.reload(str(new.path))
        outputs = run_waves(driver, waves.requests)
        assert_right(outputs, new, waves)
        assert num_loaded({each.id: outputs[each.id] for each in waves.requests[0]}) == 0
        outputs = run_waves(driver, waves.requests)
        assert_right(outputs, new, waves)
        assert num_loaded(outputs) > 0
        (tier,), (filed,) = tiers(group), settled(group)
    assert tier.num_invalid == 0 == filed.num_invalid


@pytest.mark.exhaustive
def test_a_replaced_rank_goes_on_with_what_its_daemon_has_left(keeping, checkpoint):
    waves, model = Waves(random.randrange(1 << 30)), checkpoint()
    print("seed", waves.seed)

    def replace_rank(died):
        keeping.restart()
        group.replace(died.rank)

    with serving(keeping, model, 2, 1) as (group, loaded):
        driver = new_driver(group, loaded, recover=replace_rank)
        run_waves(driver, waves.requests[:-1])
        settled(group)
        kill_and_wait(keeping.pids[1])
        outputs = run_waves(driver, waves.requests)
        tiers_after, files_after = tiers(group), settled(group)
    assert_right(outputs, model, waves)
    assert tiers_after[1].num_restored > 0
    for found in (tiers_after, files_after):
        assert all(each.num_loaded > 0 == each.num_invalid for each in found), found


@pytest.mark.parametrize("has_lost", [False, True], ids=["kept", "lost"])
def test_both_groups_use_their_files_with_prefill_apart(keeping, checkpoint, has_lost):
    """What the decoding group has in files is not computed by the other one, which has files of
    its own for what the decoding group has lost."""
    sent, model = Prompts(random.randrange(1 << 30), count=4), checkpoint()
    print("seed", sent.seed)
    prefilling, changes = keeping.endpoints[0], {"kv_files": True}
    pair = (keeping.endpoints, model, (1, 1), (1, 1))
    with prefill_pair(*pair, changes=(changes, changes)) as (driver, prefill):
        assert_right(run(driver, sent.requests), model, sent)
        run(driver, [greedy_request("last", [1, 2], 2)])  # its steps store what has ended before
        settled(driver.group)
        assert prefill.counts.prompts["moved"] > 0
    for pid in keeping.pids:
        kill_and_wait(pid)
    for directory in keeping.tiers:
        (directory / "blocks").unlink(missing_ok=True)
    for path in keeping.files:
        if has_lost and path.is_relative_to(keeping.directories[1]):
            path.unlink()
    keeping.restart()
    with prefill_pair(*pair, changes=(changes, changes)) as (driver, prefill):
        outputs = run(driver, sent.requests)
        (decoding,) = settled(driver.group)
        computing = ask(prefilling, NO_KEYS, lambda client: client.get_status().kv_files)
        counts = prefill.counts.prompts
    assert_right(outputs, model, sent)
    assert num_loaded(outputs) > 0
    if has_lost:
        assert counts["moved"] > 0 < computing.num_loaded and decoding.num_loaded == 0
    else:
        assert counts.total() == 0 == computing.num_loaded and decoding.num_loaded > 0


def test_a_block_that_is_loaded_from_both_is_refused(keeping, checkpoint):
    model = checkpoint()
    with serving(keeping, model) as (group, _):
        host = HostMoves(b"tag", loaded=MovedBlocks((3, 2), (0, 1), (b"h", b"i")))
        filed = KVFileMoves(b"tag", loaded=HashedBlocks((2,), (b"h",)))
        with pytest.raises(InvalidSchedulerOutput, match=r"extensions = 2.*fill it once"):
            group.execute_model(SchedulerOutput(extensions=(host, filed)))
        filed = replace(filed, loaded=HashedBlocks((5,), (b"h",)))
        result = group.execute_model(SchedulerOutput(extensions=(host, filed))).result()
        assert sorted(result.invalid_blocks) == [2, 3, 5]


REFUSED = {
    "experts of tokens": (
        {"architecture": "Qwen3MoeForCausalLM"},
        {"enable_return_routed_experts": True},
        "leave out enable_return_routed_experts",
    ),
    "no room for a block": ({}, {"kv_host_memory_bytes": 64}, "a KV block takes"),
}
"""Fields of the checkpoint, of the configuration, and what is said."""


@pytest.mark.parametrize("name", REFUSED)
def test_what_cannot_be_is_refused_by_name(keeping, checkpoint, name):
    fields, config, said = REFUSED[name]
    with (
        pytest.raises((ConfigError, KVPlanError), match=said),
        serving(keeping, checkpoint(**fields), **config),
    ):
        pass

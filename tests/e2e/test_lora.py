"""LoRA adapters: tokens equal those of transformers with the adapter merged into its weights,
regardless of the other requests."""

import json

import numpy as np
import pytest
from msgspec.structs import replace

from rpc_schema.config import LoraConfig, ParallelConfig
from rpc_schema.errors import (
    CapacityError,
    CheckpointError,
    ConfigError,
)
from rpc_schema.lora_request import LoraRequest
from tests.support.command_line import run_client
from tests.support.every_draft import every_draft
from tests.support.exhaustive import exhaustively
from tests.support.lora_adapters import adapted_requests, config_of, make_adapter, write_adapter
from tests.support.serving import LONG_LEASE, connect, generate, scheduler_limits, worker_config
from worker_client.driver import Driver
from worker_client.errors import (
    StepFailed,
)
from worker_client.replicas.group import DataParallelGroup
from worker_client.scheduler_output import NewRequest, SchedulerOutput
from worker_client.worker_group import WorkerGroup

ROOM = LoraConfig(max_loras=3, max_lora_rank=16, max_cpu_loras=4)


@pytest.fixture(scope="module")
def base(checkpoint):
    return checkpoint("LlamaForCausalLM", seed=31)


@pytest.fixture(scope="module")
def merged(base):
    """Adapters of several ranks, modules and scales, by name."""
    import torch

    made = {
        "every": {"seed": 1, "rank": 8},
        "attention": {"seed": 2, "rank": 3, "targets": ("q_proj", "v_proj"), "use_rslora": True},
        "patterns": {
            "seed": 3,
            "rank": 4,
            "rank_pattern": {"down_proj": 16, "k_proj": 2},
            "alpha_pattern": {"up_proj": 24.0},
            "dtype": torch.float16,
        },
        "fourth": {"seed": 4, "rank": 1, "alpha": 3.0},
    }
    return {name: make_adapter(base, name, **options) for name, options in made.items()}


def added(group, merged, *names):
    """Pairs of a merged model and its adapter in the group, as adapted_requests takes them."""
    return [(merged[name], group.loras.add(name)) for name in names]


@pytest.mark.usefixtures("each_drafter")
@pytest.mark.parametrize("shape", [exhaustively((1, 1)), (2, 2)])
def test_adapters_of_several_ranks_beside_base_rows(serve, base, merged, shape):
    with serve(base.path, *shape, lora=ROOM, max_num_batched_tokens=32) as (group, loaded):
        models = [(base, None), *added(group, merged, "every", "attention", "patterns")]
        requests, expected = adapted_requests(models, 1, 12)
        run = generate(group, loaded, requests)
    assert run.tokens == expected
    assert run.driver.records and any(record.num_requests > 4 for record in run.driver.records)


def test_adapters_have_one_id_and_version_in_all_replicas(daemons, base, merged):
    config = worker_config(base.path, lora=ROOM)
    config = replace(config, parallel=ParallelConfig(data_parallel_size=2))
    with DataParallelGroup(daemons.endpoints(2), config.parallel, lease=LONG_LEASE) as group:
        group.attach(force=True)
        loaded = group.prepare(config, num_gpu_blocks=256, reload=True)
        group.replicas[1].loras.add("fourth")
        every, attention = group.loras.add("every"), group.loras.add("attention")
        fourth = group.loras.add("fourth")  # as replica 1 has it
        known = [dict(replica.loras.known) for replica in group.replicas]
        assert [*map(len, known)] == [3, 3] and known[0].keys() == known[1].keys()
        for adapter in (every, attention, fourth):
            mine = [of_one[adapter.lora_id] for of_one in known]
            assert {(each.name, each.version) for each in mine} == {(adapter.name, adapter.version)}
        for lora_id in (every.lora_id, 77):
            taken = "every" if lora_id == 77 else "patterns"
            with pytest.raises(ConfigError):
                group.loras.add(taken, lora_id)
        group.replicas[0].loras.add("patterns", 9)
        with pytest.raises(ConfigError):  # replica 1 has it, replica 0 something else of that id
            group.loras.add("patterns", every.lora_id)
        assert group.loras.remove(9) and not group.loras.remove(9)
        assert [*map(len, (replica.loras.known for replica in group.replicas))] == [3, 3]
        models = [(base, None), (merged["every"], every), (merged["fourth"], fourth)]
        for replica, model, seed in zip(group.replicas, loaded, (1, 2), strict=True):
            requests, expected = adapted_requests(models, seed, 6)
            assert generate(replica, model, requests).tokens == expected


def test_replicated_kv_heads(serve, checkpoint):
    base = checkpoint("Qwen2ForCausalLM", seed=33, num_key_value_heads=1)
    merged = {"replicated": make_adapter(base, "replicated", seed=5, rank=6)}
    with serve(base.path, 1, 2, lora=ROOM) as (group, loaded):
        models = [(base, None), *added(group, merged, "replicated")]
        requests, expected = adapted_requests(models, 2, 6)
        assert generate(group, loaded, requests).tokens == expected


def test_more_adapters_than_slots_wait_for_each_other(serve, base, merged):
    room = LoraConfig(max_loras=2, max_lora_rank=16, max_cpu_loras=4)
    config = {"block_size": 4, "num_gpu_blocks": 22, "max_num_seqs": 6, "max_model_len": 64}
    with serve(base.path, 2, lora=room, **config) as (group, loaded):
        models = [(base, None), *added(group, merged, *merged)]
        requests, expected = adapted_requests(models, 3, 12, max_tokens=12)
        run = generate(group, loaded, requests)
    assert run.tokens == expected
    assert sum(output.num_preemptions for output in run.outputs.values()) > 0


@pytest.mark.usefixtures("each_drafter")
def test_prefixes_are_shared_within_an_adapter_alone(serve, base, merged):
    with serve(base.path, lora=ROOM, block_size=4) as (group, loaded):
        models = [(base, None), *added(group, merged, "every", "attention")]
        scheduler = every_draft(scheduler_limits(group, loaded))
        requests, _ = adapted_requests(models[:1], 4, 1, lengths=[38])
        prompt = requests[0].prompt.tolist()
        cached = []
        for seed in (5, 6):  # each adapter for the first time, then again
            requests, expected = adapted_requests(models, seed, 3, same_prompt=prompt)
            for request in requests:
                run = generate(group, loaded, [request], scheduler)
                assert run.tokens == {request.id: expected[request.id]}
                cached.append(run.outputs[request.id].num_cached_tokens)
    assert cached == [0, 0, 0, 36, 36, 36]


def test_one_adapter_is_refused_and_the_others_go_on(serve, base, merged):
    """Bad files, ids and names fail only their operation; an unknown adapter fails its request."""
    write_adapter(base.path.parent / "bad", config_of(4, 8.0, ["q_proj"], use_dora=True), {})
    (base.path.parent / "etc-link").symlink_to("/etc")
    with serve(base.path, 2, lora=ROOM) as (group, loaded):
        models = [(base, None), *added(group, merged, "every")]
        every = models[1][1]
        for name, error, words in (
            ("bad", ConfigError, "use_dora"),
            ("absent", CheckpointError, "no such directory"),
            ("../..", ConfigError, "lies outside this daemon's adapter roots"),
            ("etc-link", ConfigError, "lies outside this daemon's adapter roots"),
            ("bad\0", ConfigError, "not a path"),
        ):
            with pytest.raises(error, match=words):
                group.loras.add(name)
        with pytest.raises(ConfigError, match="has id"):
            group.loras.add("fourth", every.lora_id)
        with pytest.raises(ConfigError, match="no such adapter"):
            group.loras.pin(77)
        assert not group.loras.remove(77)
        assert [[each.name for each in rank.adapters] for rank in group.loras.list_by_rank()] == [
            ["every"],
            ["every"],
        ]
        requests, expected = adapted_requests(models, 7, 4)
        lost = every._replace(version=every.version + 1)
        unknown, _ = adapted_requests([(merged["every"], lost)], 8, 1)
        run = generate(group, loaded, [*requests, *unknown])
        failed = run.outputs[unknown[0].id]
        assert failed.finish_reason == "error" and "lacks its adapter" in failed.error
        assert {name: run.tokens[name] for name in expected} == expected


@pytest.mark.usefixtures("each_drafter")
def test_a_version_stays_with_its_requests(serve, checkpoint):
    """Replaced or removed, an adapter serves the requests that began with it; the group's LRU order
    and pins decide which adapter is evicted."""
    base = checkpoint("LlamaForCausalLM", seed=31)
    old = make_adapter(base, "changing", seed=11, rank=2)
    room = LoraConfig(max_loras=2, max_lora_rank=16)
    with serve(base.path, lora=room) as (group, loaded):
        before = group.loras.add("changing")
        assert group.loras.add("changing") == before
        driver = Driver(group, every_draft(scheduler_limits(group, loaded)))
        requests, expected = adapted_requests([(old, before)], 9, 2)
        outputs = []
        for request in requests:
            driver.add_request(request)
        outputs += driver.step()
        new = make_adapter(base, "changing", seed=12, rank=5)
        after = group.loras.add("changing", load_inplace=True)
        assert after.lora_id == before.lora_id and after.version != before.version
        more, their_tokens = adapted_requests([(new, after)], 10, 2)
        for request in more:
            driver.add_request(request)
        outputs += [*driver.step(), *driver.step()]
        assert group.loras.remove(after.lora_id)
        outputs += driver.run()
        tokens = {output.req_id: output.token_ids for output in outputs}
        assert tokens == expected | their_tokens
        first = group.loras.add("changing")
        group.loras.pin(first.lora_id)
        second = group.loras.add("every")
        third = group.loras.add("fourth")
        assert second.lora_id not in group.loras.known and third.lora_id in group.loras.known
        group.loras.pin(third.lora_id)
        with pytest.raises(CapacityError, match="pinned"):
            group.loras.add("every")
        step = SchedulerOutput(
            num_scheduled_tokens=dict.fromkeys("abc", 1),
            scheduled_new_reqs=[admission(name, n) for n, name in enumerate("abc", 1)],
        )
        with pytest.raises(StepFailed, match="requests of 3 adapters"):
            group.execute_model(step).result()


def admission(req_id, lora_id):
    extension = LoraRequest(name=req_id, lora_id=lora_id, version=5)
    return NewRequest(
        req_id=req_id,
        token_ids=np.ones(2, np.int32),
        num_prompt_tokens=2,
        num_computed_tokens=0,
        block_ids=[lora_id],
        extensions=(extension,),
    )


@pytest.mark.usefixtures("each_drafter")
@pytest.mark.parametrize("level", [exhaustively(1), 2])
def test_adapters_outlive_sleep_and_new_weights(serve, base, merged, level):
    with serve(base.path, 2, lora=ROOM, enable_sleep_mode=True) as (group, loaded):
        models = [(base, None), *added(group, merged, "every", "patterns")]
        requests, expected = adapted_requests(models, 13, 3)
        assert generate(group, loaded, requests).tokens == expected
        awake = [status.memory_bytes["adapters"] for status in group.get_status()]
        group.memory.sleep(level)
        asleep = [status.memory_bytes["adapters"] for status in group.get_status()]
        assert all(awake) and not any(asleep)
        group.memory.wake_up()
        if level == 2:
            group.weights.reload()
        assert generate(group, loaded, requests).tokens == expected


@pytest.mark.usefixtures("each_drafter")
def test_the_next_driver_adopts_requests_with_their_adapters(serve, base, merged):
    with serve(base.path, 2, lora=ROOM) as (group, loaded):
        models = [(base, None), *added(group, merged, "every", "attention")]
        requests, expected = adapted_requests(models, 14, 6, max_tokens=12)
        driver, outputs = Driver(group, every_draft(scheduler_limits(group, loaded))), []
        for request in requests:
            driver.add_request(request)
        for _ in range(5):
            outputs += driver.step()
        known, config = dict(group.loras.known), group.get_status()[0].config
    with WorkerGroup(serve.pool.endpoints(2), config.parallel, lease=LONG_LEASE) as group:
        group.attach(keep_requests=True)
        loaded = group.prepare(config)
        assert group.loras.known == known
        adopted = group.adopt_requests()
        assert any(request.num_computed_tokens for request in adopted)
        scheduler = every_draft(scheduler_limits(group, loaded))
        outputs += scheduler.adopt_requests(adopted)
        outputs += Driver(group, scheduler).run()
    tokens = {output.req_id: output.token_ids for output in outputs}
    assert tokens == expected


def test_a_new_rank_gets_the_adapters_of_the_group(daemons, base, merged):
    config = worker_config(base.path, 2, lora=ROOM)
    with connect(daemons.endpoints(2), config) as (group, loaded):
        models = [(base, None), *added(group, merged, "every", "patterns")]
        group.loras.pin(models[1][1].lora_id)
        requests, expected = adapted_requests(models, 15, 6, max_tokens=12)

        def recover(died):
            daemons.restart_dead()
            group.replace(died.rank)

        scheduler = every_draft(scheduler_limits(group, loaded))
        driver = Driver(group, scheduler, recover=recover)
        outputs = []
        for request in requests:
            driver.add_request(request)
        for _ in range(4):
            outputs += driver.step()
        daemons.kill(1)
        outputs += driver.run()
        reports = group.loras.list_by_rank()
    assert {output.req_id: output.token_ids for output in outputs} == expected
    known = [{(each.name, each.version, each.is_pinned) for each in r.adapters} for r in reports]
    assert known[0] == known[1] and len(known[0]) == 2


def test_input_lines_name_adapters(serve, base, merged, tmp_path):
    """The commands: generate adds adapters on demand; lora lists, pins, adds and removes them."""
    requests, expected = adapted_requests([(base, None), (merged["every"], None)], 16, 4)
    lines = [
        {"id": r.id, "prompt_token_ids": r.prompt.tolist(), "max_tokens": r.max_tokens}
        for r in requests
    ]
    for line in lines[1::2]:
        line["lora"] = "every"
    lines.append({"id": "lost", "prompt_token_ids": [1, 2], "lora": "absent"})
    (tmp_path / "in").write_text("".join(json.dumps(line) + "\n" for line in lines))
    endpoints = ",".join(serve.pool.endpoints(1))
    room = ["--max-loras", "2", "--num-gpu-blocks", "200", "--max-num-seqs", "8"]
    words = ["generate", "--model", base.path, "--endpoints", endpoints, "--reload", "--force"]
    files = ["--input", tmp_path / "in", "--output", tmp_path / "out"]
    run_client(tmp_path, *map(str, [*words, *room, *files]))
    results = {
        each["id"]: each for each in map(json.loads, (tmp_path / "out").read_text().splitlines())
    }
    assert {name: results[name]["token_ids"] for name in expected} == expected
    assert "no such directory" in results["lost"]["error"]

    def lora(*words):
        return run_client(tmp_path, "lora", *words, "--endpoints", endpoints).stdout

    assert "id 9" in lora("add", "attention", "--id", "9")
    lora("pin", "9")
    listed = {each["name"]: each for each in json.loads(lora("list", "--json"))}
    assert {name: each["is_pinned"] for name, each in listed.items()} == {
        "every": False,
        "attention": True,
    }
    lora("remove", str(listed["every"]["lora_id"]))
    assert [each["name"] for each in json.loads(lora("list", "--json"))] == ["attention"]

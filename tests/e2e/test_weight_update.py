"""Weight updates of a running group: over gloo and from disk, in checkpoint and kernel names, equal
to a fresh load; and the state after refused or interrupted updates."""

import contextlib
import os
import random
import shutil
import socket
import subprocess
import sys
import time
from collections import defaultdict
from pathlib import Path

import psutil
import pytest
import torch
from safetensors.torch import load_file

from examples import rl_loop
from rpc_schema.codec import encode_step
from rpc_schema.config import RendezvousAddress
from rpc_schema.errors import (
    CheckpointError,
    ConfigError,
    StateError,
    TransferError,
)
from rpc_schema.weight_transfer import (
    BroadcastEngine,
    BroadcastSource,
    DiskEngine,
    DiskSource,
    IpcEngine,
    UpdateWeights,
)
from tests.support.checkpoints import Checkpoint, decisive_prompts, prompts
from tests.support.forked_processes import ForkedPopen
from tests.support.kernel_weights import kernel_tensors
from tests.support.serving import (
    LONG_LEASE,
    assert_greedy,
    generate,
    greedy_request,
    scheduler_limits,
    worker_config,
)
from tests.support.strangers import gets_in, listening
from tests.support.waiting import wait_until
from worker_client.driver import Driver
from worker_client.errors import (
    WeightsNotWhole,
)
from worker_client.scheduler import Scheduler
from worker_client.trainer.sender import WeightSender
from worker_client.wire.worker_client import TensorList
from worker_client.worker_group import WorkerGroup

ARCHITECTURE = "Qwen3ForCausalLM"
OPTIONS = {"tie_word_embeddings": False, "num_hidden_layers": 2}
TOKENS = 8
ROOT = Path(__file__).parents[2]
TIMEOUT_S = 20.0


@pytest.fixture(scope="module")
def old(checkpoint):
    return checkpoint(ARCHITECTURE, seed=81, **OPTIONS)


@pytest.fixture(scope="module")
def new(checkpoint):
    return checkpoint(ARCHITECTURE, seed=82, **OPTIONS)


def requests_for(model, seed=5):
    prompts = decisive_prompts(model, seed, [9, 17], TOKENS)
    return [greedy_request(f"r{i}", prompt, TOKENS) for i, prompt in enumerate(prompts)]


@pytest.fixture(scope="module")
def new_requests(new):
    return requests_for(new)


def tensors_of(model):
    return dict(model.model.state_dict())


def checksums(group):
    return [reply.checksums for reply in group.weights.compute_checksums()]


def states(group):
    return [status.weights.state for status in group.get_status()]


def are_updating(group):
    return all(status.phase.startswith("UPDATING") for status in group.get_status())


def listed(tensors):
    names = {torch.float32: "float32", torch.bfloat16: "bfloat16"}
    return TensorList(
        tuple(tensors),
        tuple(names[tensor.dtype] for tensor in tensors.values()),
        tuple(tuple(tensor.shape) for tensor in tensors.values()),
    )


@pytest.fixture(scope="module")
def old_requests(old):
    return requests_for(old)


@pytest.fixture(scope="module")
def pair(serve, old):
    """Two stages with the old weights; every test leaves them so."""
    with serve(old.path, 2) as served:
        yield served


@pytest.fixture
def served(pair, old, old_requests):
    """The pair, and a check that it serves the old weights again in the end."""
    yield pair
    group, loaded = pair
    group.weights.reload(str(old.path))
    assert_greedy(generate(group, loaded, old_requests), old, old_requests)


@pytest.mark.parametrize(
    ("pp", "tp", "packed_bytes", "tied"), [(2, 1, 0, True), (1, 2, 50_000, False)]
)
def test_update_over_gloo_equals_a_fresh_load(serve, checkpoint, pp, tp, packed_bytes, tied):
    options = OPTIONS | {"tie_word_embeddings": tied}
    old, new = (checkpoint(ARCHITECTURE, seed=seed, **options) for seed in (81, 82))
    old_requests, new_requests = requests_for(old), requests_for(new)
    with serve(new.path, pp, tp) as (group, _):
        expected = checksums(group)
    with serve(old.path, pp, tp) as (group, loaded):
        before = checksums(group)
        generate(group, loaded, old_requests)
        with WeightSender(group, "gloo", timeout_s=TIMEOUT_S) as sender:
            report = sender.send(tensors_of(new), packed_bytes=packed_bytes)
            assert report.version == 1
            assert checksums(group) == expected
            assert_greedy(generate(group, loaded, new_requests), new, new_requests)
            # The same communicator serves the next update: back, by the ranks' own names.
            kernel = kernel_tensors(old.path, tp)
            packed_bytes = 50_000 - packed_bytes
            report = sender.send(kernel, format="kernel", packed_bytes=packed_bytes)
            assert report.version == 2
        assert checksums(group) == before
        assert_greedy(generate(group, loaded, old_requests), old, old_requests)
        assert states(group) == ["whole"] * (pp * tp)


def of_version(model, prompt, output):
    """Check every token by the model of its version: model(version). Returns the runs."""
    tokens, start = output.token_ids, 0
    for run in output.weights_versions:
        known = [*prompt.tolist(), *tokens[:start]]
        expected = model(run.version).greedy(known, run.num_tokens)
        assert tokens[start : start + run.num_tokens] == expected, (output, run)
        start += run.num_tokens
    assert start == len(tokens)
    return [run.version for run in output.weights_versions]


def test_tokens_and_prefixes_are_of_the_weights_that_the_outputs_name(served, old, new):
    """Updates between steps, none of which the scheduler is told of; then another driver."""
    group, loaded = served
    requests = [
        greedy_request(f"r{i}", prompt.tolist(), count)
        for i, (prompt, count) in enumerate(zip(prompts(3, [40, 33, 9]), (30, 3, 24), strict=True))
    ]
    first = group.weights.version.number
    models = {first: old}

    def reload(model):
        (version,) = {reply.version for reply in group.weights.reload(str(model.path))}
        models[version] = model

    sampled = defaultdict(list)

    def listen(result):
        for req_id in result.req_ids:
            sampled[req_id].append(result.weights_version)

    driver = Driver(group, Scheduler(scheduler_limits(group, loaded)), listen)
    outputs = {}
    for request in requests:
        driver.add_request(request)
    for number in range(20):
        outputs |= {output.req_id: output for output in driver.step()}
        if number in (8, 13):
            reload(new if number == 8 else old)
    assert outputs.keys() == {"r1"}
    reload(new)
    while len(sampled["r2"]) < 18:
        assert driver.step() == []
    endpoints = [status.endpoint for status in group.get_status()]
    config = worker_config(new.path, 2)
    with WorkerGroup(endpoints, config.parallel, lease=LONG_LEASE) as other:
        other.attach(force=True, keep_requests=True)
        assert other.prepare(config, num_gpu_blocks=256).was_loaded
        assert other.weights.version == group.weights.version
        scheduler = Scheduler(scheduler_limits(other, loaded))
        successor = Driver(other, scheduler)
        adopted, _ = successor.claim(other.adopt_requests())
        assert {each.weights_version for each in adopted} == {max(models)}
        done = [*scheduler.adopt_requests(adopted), *successor.run()]
        outputs |= {output.req_id: output for output in done}
        # A prompt that the old weights have cached.
        other.weights.reload(str(old.path))
        models[other.weights.version.number] = old
        successor.add_request(greedy_request("cached", requests[0].prompt, 3))
        (output,) = successor.run()
        outputs["cached"] = output
        assert output.num_cached_tokens == 0
    group.attach()
    group.prepare(worker_config(old.path, 2), num_gpu_blocks=256)
    by_id = {request.id: request.prompt for request in requests} | {"cached": requests[0].prompt}
    found = {
        name: of_version(models.__getitem__, by_id[name], output)
        for name, output in outputs.items()
    }
    assert found == {
        "r0": [first, first + 1, first + 2, first + 3],
        "r1": [first],
        "r2": [first, first + 1, first + 2, first + 3],
        "cached": [first + 4],
    }
    for name, output in outputs.items():
        runs = [run.version for run in output.weights_versions for _ in range(run.num_tokens)]
        assert sampled[name][: len(runs)] == runs[: len(sampled[name])]


def test_partial_update_changes_nothing_else_and_converts_dtypes(served, new):
    group, _ = served
    before = checksums(group)
    name = "model.layers.1.mlp.down_proj.weight"
    with WeightSender(group, "gloo", timeout_s=TIMEOUT_S) as sender:
        sender.send({name: new.model.state_dict()[name].double()}, partial=True)
    changed = [
        {tensor for tensor in mine if mine[tensor] != theirs[tensor]}
        for mine, theirs in zip(before, checksums(group), strict=True)
    ]
    assert changed == [set(), {name}]


def wrong_shape(tensors):
    name = "model.layers.0.self_attn.k_proj.weight"
    return tensors | {name: tensors[name].T.contiguous()}


REFUSALS = [
    ("checkpoint", wrong_shape, "k_proj.weight has another shape.*send it as"),
    (
        "checkpoint",
        lambda tensors: tensors | {"model.layers.9.mlp.up_proj.weight": torch.zeros(2, 2)},
        "no such tensor; field names = 'model.layers.9.mlp.up_proj.weight'",
    ),
    (
        "kernel",
        lambda tensors: tensors,
        r"embed_tokens.weight has another shape.*\[331, 64\]; fix: send it as \[384, 64\]",
    ),
    (
        "kernel",
        lambda tensors: {"model.norm.weight": tensors["model.norm.weight"].double()},
        "model.norm.weight has another dtype.*float32",
    ),
]


def test_update_that_cannot_be_is_refused_before_its_first_byte(served, new, old_requests):
    group, loaded = served
    before = checksums(group)
    with WeightSender(group, "gloo", timeout_s=TIMEOUT_S) as sender:
        for format, damage, words in REFUSALS:
            with pytest.raises(ConfigError, match=words):
                sender.send(damage(tensors_of(new)), format=format)
            assert checksums(group) == before
            assert states(group) == ["updating"] * 2
        # All that the model needs, but for one tensor of the second stage.
        tensors = tensors_of(new)
        last = {"lm_head.weight": tensors.pop("lm_head.weight")}
        with pytest.raises(ConfigError, match=r"1 tensors are missing.*lm_head"):
            sender.send(tensors)
        weights = group.get_status()[1].weights
        assert (weights.state, weights.num_missing, weights.missing) == (
            "updating",
            1,
            ("lm_head.weight",),
        )
        with pytest.raises(WeightsNotWhole, match="reload_weights"):
            generate(group, loaded, old_requests)
        with pytest.raises(StateError, match="needs complete weights"):
            group.weights.save_sharded_state("dirty")
        # A partial update may end only once it has brought what that one lacked.
        with pytest.raises(StateError, match="have not been written"):
            sender.send({"model.norm.weight": tensors["model.norm.weight"]}, partial=True)
        sender.send(tensors | last)
    assert states(group) == ["whole"] * 2


def test_names_of_the_former_round_are_meant_where_none_are_sent(served, old, new):
    group, _ = served
    with pytest.raises(StateError, match="start_weight_update first"):
        group.weights.update(listed(tensors_of(new)), BroadcastSource())
    group.weights.init_transfer_engine(DiskEngine())
    group.weights.start_update()
    with pytest.raises(ConfigError, match="the weight transfer engine is disk"):
        group.weights.update(TensorList(), BroadcastSource())
    with WeightSender(group, "gloo", timeout_s=TIMEOUT_S) as sender:
        sender.connect()
        group.weights.start_update()
        with pytest.raises(ConfigError, match="no names were given, now or before"):
            sender._transfer(TensorList(), [], 0)
        with pytest.raises(ConfigError, match="different lengths"):
            sender._transfer(listed(tensors_of(new))._replace(shapes=()), [], 0)
        sender.send(tensors_of(old))
        before = checksums(group)
        group.weights.start_update()
        sender._transfer(TensorList(), list(tensors_of(new).values()), 0)
        group.weights.finish_update()
    assert all(a != b for a, b in zip(before, checksums(group), strict=True))


def test_engine_that_cannot_be_leaves_the_group_serving(served, old, old_requests):
    group, loaded = served
    with socket.create_server(("127.0.0.1", 0)) as listener:
        port = listener.getsockname()[1]
    cases = [
        (ConfigError, "NCCL needs a GPU", {"backend": "nccl"}),
        (ConfigError, "a world_size of 3 at least", {"world_size": 2}),
        (TransferError, "trainer", {}),
    ]
    for error, words, changes in cases:
        place = RendezvousAddress(host="127.0.0.1", port=port, secret=bytes(32))
        fields = {"backend": "gloo", "place": place}
        with pytest.raises(error, match=words):
            group.weights.init_transfer_engine(
                BroadcastEngine(**{**fields, "world_size": 3, **changes}), timeout_s=0.5
            )
    with pytest.raises(ConfigError, match="between GPU"):
        group.weights.init_transfer_engine(IpcEngine())
    assert_greedy(generate(group, loaded, old_requests), old, old_requests)


def test_workers_and_trainer_that_have_met_let_nobody_in(served, old):
    """Check that strangers cannot read or write the rendezvous."""
    group, _ = served
    pids = [os.getpid(), *(status.pid for status in group.get_status())]
    before = {address for pid in pids for address in listening(pid)}
    with WeightSender(group, "gloo", timeout_s=TIMEOUT_S) as sender:
        sender.send(tensors_of(old))
        doors = [address for pid in pids for address in listening(pid)]
        assert set(doors) - before
        assert [door for door in doors if gets_in(door)] == []
        sender.send(tensors_of(old))


@contextlib.contextmanager
def trainer(num_workers, weights, lifetime):
    """A trainer that dies after `lifetime` tensors, and its engine."""
    words = ["gloo", num_workers, weights, lifetime, 1]
    process = ForkedPopen(
        [sys.executable, "-m", "tests.support.dying_trainer", *map(str, words)],
        cwd=ROOT,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    try:
        port, secret = process.stdout.readline().split()
        place = RendezvousAddress(host="127.0.0.1", port=int(port), secret=bytes.fromhex(secret))
        yield (
            process,
            BroadcastEngine(
                backend="gloo",
                place=place,
                world_size=num_workers + 1,
            ),
        )
    finally:
        process.kill()
        process.communicate()


def test_killed_trainer_leaves_dirty_weights_that_name_themselves(served, new, old_requests):
    group, loaded = served
    tensors = tensors_of(new)
    lifetime = random.randrange(3, len(tensors))
    with WeightSender(group, "gloo", timeout_s=TIMEOUT_S) as sender:
        sender.send(tensors)  # what is started once, and stays, is there from here on
    threads = settled_threads(group)
    with trainer(2, new.path / "model.safetensors", lifetime) as (process, engine):
        group.weights.init_transfer_engine(engine, timeout_s=TIMEOUT_S)
        group.weights.start_update()
        process.stdin.write("send\n")
        process.stdin.flush()
        with pytest.raises(TransferError):
            group.weights.update(listed(tensors_in_file(new)), BroadcastSource(round=1))
    # Rank 0 failed or rank 1 did: the other may still be about to.
    assert set(settled_states(group)) == {"dirty"}
    weights = [status.weights for status in group.get_status()]
    assert sum(report.num_dirty for report in weights) >= 1
    for report in weights:
        assert "update_weights" in report.cause
        assert report.num_missing == report.num_tensors
        assert len(report.missing) == min(16, report.num_missing)
        assert set(report.dirty) <= set(tensors)
    with pytest.raises(WeightsNotWhole):
        generate(group, loaded, old_requests)
    with pytest.raises(StateError, match="no weight update is open"):
        group.weights.finish_update()
    # Another trainer may mend it.
    with WeightSender(group, "gloo", timeout_s=TIMEOUT_S) as sender:
        sender.send(tensors)
    assert states(group) == ["whole"] * 2
    assert settled_threads(group, at_most=threads) <= threads


def test_new_driver_is_not_kept_waiting_by_a_trainer_that_never_sends(served, old, new):
    """Abort the wait in update_weights; the partly updated weights are reloaded."""
    group, _ = served
    config = worker_config(old.path, 2)
    with trainer(2, new.path / "model.safetensors", -1) as (_, engine):
        group.weights.init_transfer_engine(engine, timeout_s=100)
        group.weights.start_update()
        ids = group._channel.next_ids()
        for client in group.clients:
            tensors = listed(tensors_in_file(new))._asdict()
            update = UpdateWeights(**ids._asdict(), **tensors, source=BroadcastSource(round=1))
            client.send(encode_step(update))
        wait_until(lambda: are_updating(group), "both ranks wait for the trainer")
        endpoints = [status.endpoint for status in group.get_status()]
        with WorkerGroup(endpoints, config.parallel, lease=LONG_LEASE) as other:
            statuses = other.attach(timeout_s=30, force=True)
            assert {status.weights.state for status in statuses} == {"dirty"}
            assert {status.link_state for status in statuses} == {"up"}
            with pytest.raises(WeightsNotWhole):
                other.execute_model(None)
            assert other.prepare(config, num_gpu_blocks=256).was_loaded
            assert states(other) == ["whole"] * 2
    group.attach()
    group.prepare(config, num_gpu_blocks=256)


def test_update_from_disk(served, new, old, new_requests, model_root):
    group, loaded = served
    group.weights.init_transfer_engine(DiskEngine())
    group.weights.start_update()
    damaged = model_root / "disk-damaged"
    shutil.copytree(new.path, damaged)
    file = damaged / "model.safetensors"
    file.write_bytes(file.read_bytes()[:-1])
    before = checksums(group)
    for path, error, words in [
        (damaged, CheckpointError, "truncated"),
        ("/etc", ConfigError, "outside this daemon's model roots"),
    ]:
        with pytest.raises(error, match=words):
            group.weights.update(TensorList(), DiskSource(model=str(path)))
        assert checksums(group) == before
    replies = group.weights.update(TensorList(), DiskSource(model=str(new.path)))
    assert all(reply.num_tensors > 0 for reply in replies)
    group.weights.finish_update()
    assert_greedy(generate(group, loaded, new_requests), new, new_requests)


def test_reload_is_in_place_or_not_at_all(served, checkpoint, old, new, new_requests, model_root):
    group, loaded = served
    before = checksums(group)
    truncated = model_root / "truncated"
    shutil.copytree(new.path, truncated)
    file = truncated / "model.safetensors"
    file.write_bytes(file.read_bytes()[: file.stat().st_size // 2])
    other = checkpoint(ARCHITECTURE, seed=83, **(OPTIONS | {"intermediate_size": 128}))
    for path, error, words in [
        (truncated, CheckpointError, "model.safetensors is truncated"),
        (model_root / "nowhere", CheckpointError, "no such directory"),
        ("/tmp", ConfigError, "outside this daemon's model roots"),
        (other.path, ConfigError, "the loaded model has 96; field intermediate_size"),
    ]:
        with pytest.raises(error, match=words):
            group.weights.reload(str(path))
        assert checksums(group) == before
        assert states(group) == ["whole"] * 2
    replies = group.weights.reload(str(new.path))
    assert {reply.version for reply in replies} == {group.get_status()[0].weights.version}
    assert_greedy(generate(group, loaded, new_requests), new, new_requests)
    assert {status.config.model.model for status in group.get_status()} == {str(new.path)}


def test_update_config_takes_load_and_model_overrides_only(served, old, new, new_requests):
    group, loaded = served
    for overrides, words in [
        ({"cache.block_size": 8}, "only the load and model sections"),
        ({"model.model": str(new.path), "model.colour": 1}, "only the load and model sections"),
        ({"model.dtype": "bfloat16"}, "fixed when a model is loaded"),
        ({"model.quantization": "fp8"}, "fixed when a model is loaded"),
        ({"load.load_format": "pickle"}, "the value is not allowed"),
        ({"model.seed": -1}, "the value is not allowed"),
    ]:
        with pytest.raises(ConfigError, match=words):
            group.weights.update_config(overrides)
    before = checksums(group)
    group.weights.reload()
    assert checksums(group) == before, "a refused override leaves nothing behind"
    group.weights.update_config({"model.model": str(new.path)})
    assert checksums(group) == before
    group.weights.reload()
    assert_greedy(generate(group, loaded, new_requests), new, new_requests)
    group.weights.update_config({"load.load_format": "dummy", "model.seed": 3})
    group.weights.reload()
    assert checksums(group) != before
    group.weights.update_config({"load.load_format": "auto"})


def tensors_in_file(model):
    """In the order of the file, which the trainer follows."""
    return load_file(model.path / "model.safetensors")


def settled_threads(group, at_most=0):
    """Threads of all daemons without an engine, once they are few enough or stay as they are."""
    group.weights.init_transfer_engine(DiskEngine())
    daemons = [psutil.Process(status.pid) for status in group.get_status()]
    counts, deadline = [], time.monotonic() + TIMEOUT_S
    while time.monotonic() < deadline:
        counts.append(sum(daemon.num_threads() for daemon in daemons))
        if counts[-1] <= at_most or (not at_most and counts[-10:] == counts[-1:] * 10):
            break
        time.sleep(0.05)
    return counts[-1]


def eventually(read, wanted, seconds=10.0):
    deadline = time.monotonic() + seconds
    while (value := read()) != wanted and time.monotonic() < deadline:
        time.sleep(0.05)
    return value


def settled_states(group):
    return eventually(lambda: states(group), ["dirty"] * group.parallel.world_size, TIMEOUT_S)


def test_fifty_cycles_of_sleep_and_update_leak_nothing(serve, old, new, old_requests, new_requests):
    """Check that no old weights are kept, and that the newest serve like a fresh load."""
    figures = []
    with serve(old.path, enable_sleep_mode=True) as (group, loaded):
        with WeightSender(group, "gloo") as sender:
            for number in range(51):
                group.memory.sleep(2)
                with pytest.raises(StateError, match="wake_up"):
                    group.weights.reload()
                group.memory.wake_up(["weights"])
                sender.send(tensors_of(old if number % 2 else new))
                group.memory.wake_up(["kv_cache"])
                figures.append([dict(status.memory_bytes) for status in group.get_status()])
        for figure in figures:  # the host's, which never stand still
            for kinds in figure:
                for name in ("free", "context", "activations", "others"):
                    kinds.pop(name, None)
        assert figures[1] == figures[-1]
        assert_greedy(generate(group, loaded, new_requests), new, new_requests)
        sent = checksums(group)
        group.memory.sleep(2)
        group.memory.wake_up()
    with serve(old.path, enable_sleep_mode=True, reload=False) as (group, loaded):
        assert loaded.was_loaded  # and its weights are read again, since nobody has them
        assert_greedy(generate(group, loaded, old_requests), old, old_requests)
    with serve(new.path) as (group, _):
        assert checksums(group) == sent


def test_toy_reinforcement_learning_keeps_workers_and_trainer_equal(serve, model_root):
    """The example's own loop; at the end a greedy prompt shows which weights the workers have."""
    policy = rl_loop.make_policy(model_root / "policy")
    before = Checkpoint(model_root / "policy", policy).greedy([5, 6, 7], 8)
    options = {"max_num_seqs": rl_loop.NUM_SAMPLES, "enable_sleep_mode": True}
    with serve(model_root / "policy", 2, **options) as (group, loaded):
        scheduler = Scheduler(scheduler_limits(group, loaded))
        serving = rl_loop.Serving(group, Driver(group, scheduler))
        assert rl_loop.greedy(serving.driver, [5, 6, 7], 8) == before
        rewards = rl_loop.train(serving, policy, 4)
        after = Checkpoint(model_root / "policy", policy).greedy([5, 6, 7], 8)
        assert rl_loop.greedy(serving.driver, [5, 6, 7], 8) == after != before
    assert rewards[-1] > rewards[0]

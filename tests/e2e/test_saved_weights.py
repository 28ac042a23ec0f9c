"""Saving and loading a group's weights over the wire: pipeline and tensor parallel on gloo, one set
for all ranks or none."""

import json
import os
import shutil
import signal
from pathlib import Path

import pytest
from msgspec.structs import replace

from rpc_schema.config import ParallelConfig
from rpc_schema.errors import (
    CheckpointError,
    ConfigError,
    StateError,
)
from tests.support.checkpoints import decisive_prompts
from tests.support.command_line import run_client, short_directory
from tests.support.exhaustive import exhaustively
from tests.support.saving_daemons import saving_daemons
from tests.support.serving import (
    LONG_LEASE,
    assert_greedy,
    connect,
    generate,
    greedy_request,
    worker_config,
)
from worker_client.errors import (
    WorkerDied,
)
from worker_client.replicas.group import DataParallelGroup
from worker_client.worker_group import WorkerGroup


@pytest.fixture(scope="module")
def save_root(tmp_path_factory):
    return tmp_path_factory.mktemp("saves") / "made-by-the-daemons"


@pytest.fixture(scope="module")
def pair(model_root, save_root):
    """Two daemons with one save root."""
    with saving_daemons(model_root, save_root, save_root) as daemons:
        yield daemons


@pytest.fixture
def model(checkpoint):
    return checkpoint("Qwen3ForCausalLM", tie_word_embeddings=True, seed=71)


@pytest.fixture
def requests(model):
    prompts = decisive_prompts(model, 72, [7, 25, 12], 10)
    return [greedy_request(f"r{index}", prompt, 10) for index, prompt in enumerate(prompts)]


def checksums(group: WorkerGroup) -> list[dict[str, bytes]]:
    return [reply.checksums for reply in group.weights.compute_checksums()]


def saved_config(home: Path, *shape: int, **options: object):
    return worker_config(home, *shape, load_format="sharded_state", **options)


@pytest.mark.parametrize(("pp", "tp"), [(2, 1), exhaustively(1, 2)])
def test_round_trip_of_a_group(pair, save_root, model, requests, pp, tp):
    name = f"pp{pp}-tp{tp}"
    with connect(pair.endpoints, worker_config(model.path, pp, tp)) as (group, loaded):
        before = checksums(group)
        group.weights.reload(version=7)
        replies = group.weights.save_sharded_state(name, max_size_bytes=100_000)
        assert_greedy(generate(group, loaded, requests), model, requests)
    assert [reply.rank for reply in replies] == [0, 1]
    assert all(reply.num_files > 1 for reply in replies)
    assert save_root.stat().st_mode & 0o777 == 0o700
    with connect(pair.endpoints, saved_config(save_root / name, pp, tp)) as (group, loaded):
        assert checksums(group) == before
        assert [status.weights.version for status in group.get_status()] == [7, 7]
        assert_greedy(generate(group, loaded, requests), model, requests)
        # The same weights once more, over the set that they were read from.
        group.weights.save_sharded_state(name)
        assert group.weights.reload()[0].version == 8
    with connect(pair.endpoints, saved_config(save_root / name, pp, tp)) as (group, _):
        assert checksums(group) == before
        assert group.weights.version.number == 7, "as it was saved"
        config = saved_config(save_root / name, pp, tp)
        group.prepare(config, num_gpu_blocks=64, reload=True, weights_version=12)
        assert group.weights.version.number == 12
    assert len(list((save_root / name).iterdir())) == 2


def test_every_replica_reads_and_writes_the_same_set(pair, save_root, model, requests):
    """A set has one replica's ranks, so the second replica's first rank reads the first one's."""

    def configured(path, **options):
        config = worker_config(path, **options)
        return replace(config, parallel=ParallelConfig(data_parallel_size=2))

    written, read = (
        configured(model.path),
        configured(save_root / "one", load_format="sharded_state"),
    )
    with DataParallelGroup(pair.endpoints, read.parallel, lease=LONG_LEASE) as group:
        group.attach(force=True)
        group.prepare(written, num_gpu_blocks=256, reload=True)
        (before,) = checksums(group.replicas[0])
        (reply,) = group.replicas[1].weights.save_sharded_state("one")
        assert reply.rank == 1
        loaded = group.prepare(read, num_gpu_blocks=256, reload=True)
        for replica, own in zip(group.replicas, loaded, strict=True):
            assert checksums(replica) == [before]
            assert_greedy(generate(replica, own, requests), model, requests)


def test_command_line_generates_from_a_saved_set(pair, save_root, model, requests, tmp_path):
    """Read by daemons without a save root."""
    with connect(pair.endpoints, worker_config(model.path, 2)) as (group, _):
        group.weights.save_sharded_state("by-command")
    (tmp_path / "input.jsonl").write_text(
        "".join(
            json.dumps({"prompt_token_ids": r.prompt.tolist(), "max_tokens": 10}) + "\n"
            for r in requests
        )
    )
    directory = short_directory()
    output = tmp_path / "output.jsonl"
    options = ["--model", str(save_root / "by-command"), "--load-format", "sharded_state"]
    sizes = ["--pipeline-parallel-size", "2", "--num-gpu-blocks", "64", "--device", "cpu"]
    files = ["--input", str(tmp_path / "input.jsonl"), "--output", str(output)]
    run_client(directory, "generate", *options, *sizes, *files)
    shutil.rmtree(directory)
    tokens = [json.loads(line)["token_ids"] for line in output.read_text().splitlines()]
    assert tokens == [model.greedy(r.prompt.tolist(), 10) for r in requests]


def test_group_of_another_shape_is_told_which(pair, save_root, model):
    endpoints, home = pair.endpoints, save_root / "two-stages"
    with connect(endpoints, worker_config(model.path, 2, layer_partition=(1, 3))) as (group, _):
        group.weights.save_sharded_state("two-stages")
    cases = [
        ((1, 2), {}, "pipeline_parallel_size = 1"),
        ((1, 1), {}, "pipeline_parallel_size = 1"),
        ((2, 1), {}, r"layer_partition = \(2, 2\)"),
        ((2, 1), {"layer_partition": (1, 3), "dtype": "bfloat16"}, "dtype = 'bfloat16'"),
    ]
    for shape, options, words in cases:
        config = saved_config(home, *shape, **options)
        with (
            pytest.raises(ConfigError, match=f"field {words}; fix: load it with"),
            connect(endpoints[: config.parallel.world_size], config),
        ):
            pass
    fitting = saved_config(home, 2, layer_partition=(1, 3), dtype="auto")
    with connect(endpoints, fitting) as (group, _):
        assert {status.load for status in group.get_status()} == {"READY"}


def test_damaged_file_of_one_rank_is_named_by_it(pair, save_root, model):
    with connect(pair.endpoints, worker_config(model.path, 1, 2)) as (group, _):
        group.weights.save_sharded_state("damaged")
    (path,) = (save_root / "damaged").glob("*/model-rank-1-part-0.safetensors")
    path.write_bytes(path.read_bytes()[:-1])
    with (
        pytest.raises(CheckpointError, match="model-rank-1-part-0") as caught,
        connect(pair.endpoints, saved_config(save_root / "damaged", 1, 2)),
    ):
        pass
    assert caught.value.rank == 1


def test_save_is_refused_before_there_is_a_model(pair):
    with WorkerGroup(
        pair.endpoints, ParallelConfig(pipeline_parallel_size=2), lease=LONG_LEASE
    ) as group:
        group.attach()
        group.reset("CREATED")
        with pytest.raises(StateError, match="SaveShardedState is not legal"):
            group.weights.save_sharded_state("early")
        with pytest.raises(StateError, match="ComputeWeightChecksums is not legal"):
            group.weights.compute_checksums()


@pytest.mark.parametrize(
    ("roots", "words"),
    [(("a", None), "start it with --save-root"), (("a", "b"), "give the same --save-root to all")],
)
def test_save_that_one_rank_cannot_share_leaves_nothing_on_any(
    model_root, model, requests, tmp_path, roots, words
):
    paths = [None if root is None else tmp_path / root for root in roots]
    with (
        saving_daemons(model_root, *paths) as daemons,
        connect(daemons.endpoints, worker_config(model.path, 2)) as (group, loaded),
    ):
        with pytest.raises(ConfigError, match=words):
            group.weights.save_sharded_state("set")
        assert not [file for path in paths if path is not None for file in path.iterdir()]
        assert_greedy(generate(group, loaded, requests), model, requests)


@pytest.mark.exhaustive
def test_daemon_killed_before_the_end_of_a_save_leaves_the_old_set(model_root, model, tmp_path):
    """Rank 1 dies between the two halves: the set stays as it was, and the next save cleans up."""
    root = tmp_path / "root"
    config = worker_config(model.path, 2)
    with saving_daemons(model_root, root, root) as daemons:
        with connect(daemons.endpoints, config) as (group, _):
            group.weights.save_sharded_state("set")
            before = checksums(group)
            index = (root / "set" / "index.json").read_bytes()
            os.kill(daemons.pids[1], signal.SIGKILL)
            with pytest.raises(WorkerDied):
                group.weights.save_sharded_state("set")
        assert (root / "set" / "index.json").read_bytes() == index
    with saving_daemons(model_root, root, root) as daemons:
        with connect(daemons.endpoints, saved_config(root / "set", 2)) as (group, _):
            assert checksums(group) == before
            group.weights.save_sharded_state("set")
        assert len(list((root / "set").iterdir())) == 2


def test_round_trip_by_the_tensorizer_library(pair, save_root, model, requests):
    pytest.importorskip("tensorizer")
    home = save_root / "tensorized"
    with connect(pair.endpoints, worker_config(model.path, 2)) as (group, _):
        before = checksums(group)
        replies = group.weights.save_tensorized_model("tensorized")
    assert [reply.rank for reply in replies] == [0, 1]
    config = worker_config(home, 2, load_format="tensorizer")
    with connect(pair.endpoints, config) as (group, loaded):
        assert checksums(group) == before
        assert_greedy(generate(group, loaded, requests), model, requests)
    with (
        pytest.raises(ConfigError, match="field pipeline_parallel_size = 1; fix: load it"),
        connect(pair.endpoints, worker_config(home, 1, 2, load_format="tensorizer")),
    ):
        pass
    with (
        pytest.raises(ConfigError, match="field load_format = 'sharded_state'"),
        connect(pair.endpoints, saved_config(home, 2)),
    ):
        pass

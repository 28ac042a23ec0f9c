"""Invalid models, shapes and endpoints: each gives a typed error that names field, value and fix,
and the daemons keep serving."""

import json
import shutil
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from subprocess import run

import pytest

from rpc_schema.config import ParallelConfig
from rpc_schema.errors import (
    CheckpointError,
    ConfigError,
    IncompatibleError,
    WorkerDaemonError,
    WorkerError,
)
from rpc_schema.version import PROTOCOL_VERSION
from rpc_schema.weight_transfer import DiskEngine, DiskSource
from tests.support.checkpoints import DYNAMIC
from tests.support.driving import assert_serves
from tests.support.exhaustive import exhaustively
from tests.support.faulty_daemon import INJECTED, Fault, FaultyDaemons
from tests.support.quantized import compressed_config
from tests.support.secured import ask
from tests.support.serving import connect, generate, greedy_request, worker_config
from tests.support.waiting import PATIENCE_S
from worker_client.errors import (
    ClientError,
    ConfigMismatchError,
    EndpointError,
    KVPlanError,
    LaunchError,
    NothingListens,
    RequestError,
)
from worker_client.launcher import LocalDaemons
from worker_client.wire.keys import NO_KEYS
from worker_client.wire.worker_client import TensorList
from worker_client.worker_group import WorkerGroup
from worker_host.exit_codes import ExitCode


def set_fields(**fields):
    def change(path):
        config = path / "config.json"
        config.write_text(json.dumps({**json.loads(config.read_text()), **fields}))

    return change


def last_shard(path):
    return sorted(path.glob("model-*.safetensors"))[-1]


def cut_shard(path):
    shard = last_shard(path)
    shard.write_bytes(shard.read_bytes()[: shard.stat().st_size // 2])


def cut_header(path):
    shard = last_shard(path)
    shard.write_bytes(shard.read_bytes()[:5])


def remove_weights(path):
    for file in path.glob("model*"):
        file.unlink()


def break_index(path):
    (path / "model.safetensors.index.json").write_text('{"weight_map": []}')


def leave_directory(path):
    """An index that points outside the checkpoint."""
    index = path / "model.safetensors.index.json"
    names = json.loads(index.read_text())
    names["weight_map"] = dict.fromkeys(names["weight_map"], "../other/model.safetensors")
    index.write_text(json.dumps(names))


@pytest.fixture
def assert_refused(daemons, checkpoint):
    """assert_refused(config, error, words): loading fails so, and the daemons serve afterwards."""

    def check(config, error, *words, num_gpu_blocks=256):
        endpoints = daemons.endpoints(config.parallel.world_size)
        with (
            pytest.raises(error) as raised,
            connect(endpoints, config, num_gpu_blocks=num_gpu_blocks),
        ):
            pass
        for word in ("field ", "fix: ", *words):
            assert word in str(raised.value)
        assert_serves(
            endpoints,
            checkpoint(),
            config.parallel.pipeline_parallel_size,
            config.parallel.tensor_parallel_size,
        )

    return check


@pytest.fixture(scope="module")
def sharded(checkpoint):
    return checkpoint(max_shard_size="100KB")


@pytest.fixture
def broken_copy(sharded, model_root):
    """A copy of a checkpoint in several shards, to be broken."""
    path = model_root / "broken"
    shutil.copytree(sharded.path, path)
    assert len(list(path.glob("model-*.safetensors"))) > 1
    yield path
    shutil.rmtree(path)


@pytest.mark.parametrize(
    ("change", "error", "words"),
    [
        (
            set_fields(architectures=["BertForMaskedLM"]),
            ConfigError,
            ("architectures", "BertForMaskedLM", "LlamaForCausalLM"),
        ),
        exhaustively(set_fields(architectures=None), ConfigError, ("architectures",)),
        (set_fields(hidden_size="64"), ConfigError, ("hidden_size", "'64'", "integer")),
        (set_fields(num_hidden_layers=2.5), ConfigError, ("num_hidden_layers", "2.5")),
        (set_fields(vocab_size=True), ConfigError, ("vocab_size", "True")),
        exhaustively(set_fields(vocab_size=-1), ConfigError, ("vocab_size", "-1")),
        exhaustively(set_fields(rms_norm_eps="tiny"), ConfigError, ("rms_norm_eps", "tiny")),
        exhaustively(set_fields(rope_parameters=[1]), ConfigError, ("rope_parameters",)),
        (set_fields(hidden_act="gelu"), ConfigError, ("hidden_act", "gelu")),
        (set_fields(intermediate_size=None), ConfigError, ("intermediate_size",)),
        (set_fields(intermediate_size=80), CheckpointError, ("model-", "80")),
        (lambda path: last_shard(path).unlink(), CheckpointError, ("model-", "missing")),
        (cut_shard, CheckpointError, ("model-", "truncated")),
        (cut_header, CheckpointError, ("model-", "truncated")),
        (remove_weights, CheckpointError, ("safetensors",)),
        (break_index, CheckpointError, ("index.json",)),
        (leave_directory, CheckpointError, ("../other",)),
        (lambda path: (path / "config.json").unlink(), CheckpointError, ("config.json",)),
        (
            lambda path: (path / "config.json").write_text('{"hidden_size":'),
            CheckpointError,
            ("config.json", "JSON"),
        ),
    ],
)
def test_broken_checkpoint(assert_refused, broken_copy, change, error, words):
    change(broken_copy)
    assert_refused(worker_config(broken_copy), error, *words)


def test_health_is_answered_while_a_catastrophic_pattern_is_matched(
    assert_refused, daemons, broken_copy
):
    quantization = compressed_config("channel", "dynamic", [f"re:{'.?' * 100}!"])
    set_fields(quantization_config=quantization)(broken_copy)
    [endpoint] = daemons.endpoints(1)
    config = worker_config(broken_copy)
    words = ("quantization_config.ignore", "too much time", "list the names")
    answered: list[bool] = []
    with ThreadPoolExecutor(1) as pool:
        refusal = pool.submit(assert_refused, config, ConfigError, *words)
        while not refusal.done():
            answered.append(ask(endpoint, NO_KEYS, lambda client: client.check_health()).healthy)
            time.sleep(0.05)
    refusal.result()
    assert all(answered) and len(answered) > 5


def test_dtype_of_a_checkpoint_that_cannot_be_computed_in(assert_refused, broken_copy):
    set_fields(dtype="float64")(broken_copy)
    assert_refused(
        worker_config(broken_copy, dtype="auto"), ConfigError, "dtype", "float64", "float32"
    )


@pytest.mark.timeout(PATIENCE_S)
def test_dtype_that_no_message_can_carry(daemons, checkpoint):
    """The driver need not wait for an answer that cannot come."""
    endpoints = daemons.endpoints(1)
    config = worker_config(checkpoint().path, dtype="float64")
    with pytest.raises(WorkerDaemonError, match="float64") as raised, connect(endpoints, config):
        pass
    assert "dtype" in str(raised.value)
    assert_serves(endpoints, checkpoint())


@pytest.mark.parametrize(
    ("pp", "tp", "overrides", "options", "words"),
    [
        (2, 1, {"num_hidden_layers": 1}, {}, ("pipeline_parallel_size", "2", "at most 1")),
        (2, 1, {}, {"layer_partition": (1, 2)}, ("partition", "1, 2", "sum 4")),
        exhaustively(2, 1, {}, {"layer_partition": (4,)}, ("partition", "4", "2 positive counts")),
        (
            1,
            2,
            {"hidden_size": 48, "num_attention_heads": 3, "num_key_value_heads": 3},
            {},
            ("tensor_parallel_size", "2", "num_attention_heads 3"),
        ),
        exhaustively(1, 2, {"intermediate_size": 97}, {}, ("tensor_parallel_size", "2", "97")),
    ],
)
def test_shape_that_does_not_fit_the_model(
    assert_refused, checkpoint, pp, tp, overrides, options, words
):
    config = worker_config(checkpoint(**overrides).path, pp, tp, **options)
    assert_refused(config, ConfigError, *words)


def test_number_of_endpoints_that_is_not_the_group_s(daemons):
    with pytest.raises(ClientError, match="needs 2 daemons"):
        WorkerGroup(daemons.endpoints(1), ParallelConfig(tensor_parallel_size=2))
    with pytest.raises(ClientError, match="named twice"):
        WorkerGroup(daemons.endpoints(1) * 2, ParallelConfig(tensor_parallel_size=2))


@pytest.mark.parametrize("how", ["elsewhere", "dots", "link", "relative"])
def test_model_outside_the_roots(assert_refused, checkpoint, model_root, tmp_path, how):
    outside = tmp_path / "model"
    shutil.copytree(checkpoint().path, outside)
    link = model_root / "link"
    paths = {
        "elsewhere": outside,
        "dots": f"{model_root}/../{outside.relative_to('/tmp')}",
        "link": link,
        "relative": f"../{outside.relative_to('/tmp')}",
    }
    link.symlink_to(outside)
    try:
        assert_refused(worker_config(paths[how]), ConfigError, "model", "outside", "--model-root")
    finally:
        link.unlink()


def test_model_that_is_not_there(assert_refused, model_root):
    config = worker_config(model_root / "nothing")
    assert_refused(config, CheckpointError, "model", "nothing", "no such directory")


def test_context_beyond_dynamic_rope_s_exact_range(assert_refused, checkpoint):
    model = checkpoint(rope=DYNAMIC)
    config = worker_config(model.path, max_model_len=193)
    assert_refused(config, ConfigError, "max_model_len", "193", "exact", "at most 192")


def test_too_few_blocks_for_one_request(assert_refused, checkpoint):
    config = worker_config(checkpoint().path, block_size=16)
    assert_refused(config, KVPlanError, "max_model_len", "192", "13", num_gpu_blocks=12)


def test_more_blocks_than_fit(assert_refused, checkpoint):
    config = worker_config(checkpoint().path)
    assert_refused(config, KVPlanError, "num_gpu_blocks", "1000000000", num_gpu_blocks=10**9)


@pytest.mark.parametrize(
    ("options", "field"),
    [
        ({"block_size": 12}, "cache.block_size = 12"),
        ({"max_num_batched_tokens": 8}, "scheduler.max_num_batched_tokens = 8"),
    ],
)
def test_sizes_that_no_step_could_run_with(assert_refused, checkpoint, options, field):
    assert_refused(worker_config(checkpoint().path, **options), ConfigError, field)


def test_another_configuration_names_every_field_that_differs(daemons, checkpoint):
    endpoints = daemons.endpoints(1)
    loaded = worker_config(checkpoint().path, max_num_seqs=8)
    other = worker_config(checkpoint(seed=1).path, max_num_seqs=9, block_size=8)
    request = greedy_request("a", [5, 6, 7], 4)
    with connect(endpoints, loaded):
        pass
    with (
        pytest.raises(ConfigMismatchError) as raised,
        connect(endpoints, other, reload=False),
    ):
        pass
    assert {difference.split(":")[0] for difference in raised.value.differences} == {
        *("model.model", "scheduler.max_num_seqs", "cache.block_size")
    }
    assert "reload" in raised.value.fix
    with connect(endpoints, loaded, reload=False) as (group, model):
        assert model.was_loaded
        before = generate(group, model, [request]).tokens["a"]
    with connect(endpoints, other, reload=True) as (group, model):
        assert not model.was_loaded
        after = generate(group, model, [request]).tokens["a"]
    assert (before, after) == (
        checkpoint().greedy([5, 6, 7], 4),
        checkpoint(seed=1).greedy([5, 6, 7], 4),
    )


def test_a_checkpoint_replaced_in_place_is_not_taken_for_the_loaded_one(
    daemons, checkpoint, model_root
):
    old, new = checkpoint(), checkpoint(seed=1)
    path = model_root / "replaced"
    shutil.copytree(old.path, path)
    (path / "other.safetensors").symlink_to("nowhere")
    endpoints, config, request = daemons.endpoints(2), worker_config(path, 2), [5, 6, 7]

    def serves(reference, reload):
        with connect(endpoints, config, reload=reload) as (group, model):
            tokens = generate(group, model, [greedy_request("a", request, 4)]).tokens["a"]
            assert tokens == reference.greedy(request, 4)
            return model.was_loaded

    assert not serves(old, reload=True)
    assert serves(old, reload=False)
    shutil.copy2(new.path / "model.safetensors", path)
    with (
        pytest.raises(ConfigMismatchError, match=f"files of {path}: newer != loaded") as raised,
        connect(endpoints, config, reload=False),
    ):
        pass
    assert "reload" in raised.value.fix
    assert not serves(new, reload=True)
    shutil.copy2(old.path / "model.safetensors", path)
    with connect(endpoints, worker_config(path, 2), reload=True) as (group, _):
        shutil.copy2(new.path / "model.safetensors", path)
        group.weights.reload()
    assert serves(new, reload=False), "reloaded from the files as they are"
    with connect(endpoints, config, reload=False) as (group, _):
        group.weights.init_transfer_engine(DiskEngine())
        group.weights.start_update()
        group.weights.update(TensorList(), DiskSource(model=str(old.path)))
        group.weights.finish_update()
    shutil.copy2(old.path / "model.safetensors", path)
    assert serves(old, reload=False), "the weights are a trainer's, not the files'"
    shutil.rmtree(path)
    assert serves(old, reload=False)


def test_prompt_longer_than_the_context(serve, checkpoint):
    with (
        serve(checkpoint().path, max_model_len=32) as (group, loaded),
        pytest.raises(RequestError, match="max_model_len = 32") as raised,
    ):
        generate(group, loaded, [greedy_request("long", [1] * 32, 4)])
    assert raised.value.field == "prompt"


def test_other_protocol_version_names_both(daemons, checkpoint, monkeypatch):
    endpoints = daemons.endpoints(1)
    config = worker_config(checkpoint().path)
    with monkeypatch.context() as patch:
        patch.setattr("worker_client.wire.health_client.PROTOCOL_VERSION", 4711)
        with pytest.raises(IncompatibleError) as raised, connect(endpoints, config):
            pass
    assert f"version {PROTOCOL_VERSION}," in str(raised.value)
    assert "4711" in str(raised.value)
    assert "fix: " in str(raised.value)
    assert_serves(endpoints, checkpoint())


def test_tcp_is_refused_on_both_sides(model_root):
    with pytest.raises(EndpointError, match=r"tcp needs keys.*tcp://127.0.0.1:5000.*--key-file"):
        WorkerGroup(["tcp://127.0.0.1:5000"], ParallelConfig())
    command = (sys.executable, "-m", "worker_daemon", "serve", "--device", "cpu")
    done = run(
        [*command, "--endpoint", "tcp://127.0.0.1:5000"],
        capture_output=True,
        text=True,
        timeout=PATIENCE_S,
        check=False,
    )
    assert done.returncode == 78
    assert "tcp://127.0.0.1:5000: tcp needs a key-file" in done.stderr
    assert "worker-daemon keygen" in done.stderr


def test_endpoint_in_use(daemons, checkpoint):
    endpoint = daemons.endpoints(1)[0]
    command = (sys.executable, "-m", "worker_daemon", "serve", "--device", "cpu")
    done = run(
        [*command, "--endpoint", endpoint],
        capture_output=True,
        text=True,
        timeout=PATIENCE_S,
        check=False,
    )
    assert done.returncode == 73
    assert endpoint.removeprefix("ipc://") in done.stderr
    assert_serves([endpoint], checkpoint())


def test_daemon_that_never_becomes_ready(model_root, tmp_path):
    with pytest.raises(LaunchError, match=r"did not answer within 3 s") as raised:
        FaultyDaemons(2, model_root, tmp_path, Fault("make_worker", "hang"), ready_timeout_s=3.0)
    assert raised.value.exit_code is None


def test_daemon_that_cannot_make_its_worker(model_root, tmp_path):
    with pytest.raises(LaunchError, match="exited") as raised:
        FaultyDaemons(1, model_root, tmp_path, Fault("make_worker", "raise"))
    assert raised.value.exit_code == 70
    assert INJECTED in raised.value.log_tail


def test_daemon_whose_device_is_not_there(model_root):
    with pytest.raises(LaunchError, match=r"exited.*a setting is wrong") as raised:
        LocalDaemons(["cuda:7"], model_root)
    assert raised.value.exit_code == ExitCode.CONFIG
    assert "cuda:7" in raised.value.log_tail and "fix: use one of" in raised.value.log_tail


def test_worker_that_raises_in_a_load(model_root, tmp_path, checkpoint):
    config = worker_config(checkpoint().path, 2)
    with FaultyDaemons(2, model_root, tmp_path) as daemons:
        daemons.faults[1].put(Fault("load_model", "raise"))
        with (
            pytest.raises(WorkerError, match=INJECTED) as raised,
            connect(daemons.endpoints, config),
        ):
            pass
        assert raised.value.rank == 1
        assert "Traceback" in raised.value.remote_traceback
        assert_serves(daemons.endpoints, checkpoint(), pp=2)


def test_endpoint_of_nobody_is_given_up_at_once(tmp_path):
    endpoint = f"ipc://{tmp_path}/w"
    with (
        WorkerGroup([endpoint], ParallelConfig()) as group,
        pytest.raises(NothingListens, match=endpoint),
    ):
        group.attach()

"""A worker's refusals, after which it keeps serving: models, plans, sizes, failing steps."""

import gc
import json
import weakref

import msgspec
import pytest
import torch
from worker_driver import GREEDY, WorkerDriver

from rpc_schema import config, lifecycle
from rpc_schema.errors import (
    CapacityError,
    CheckpointError,
    ConfigError,
    DeviceError,
    InvalidStepError,
    PrecededByError,
)


@pytest.fixture
def loading(make_worker, llama):
    """A driver whose worker has a device but no model."""
    driver = WorkerDriver(make_worker())
    driver.init_device()
    return driver


@pytest.fixture
def loaded(loading):
    loading.load_model("llama")
    return loading


def refused(error_type, field, call, *args, **kwargs):
    with pytest.raises(error_type) as caught:
        call(*args, **kwargs)
    assert caught.value.field == field
    assert caught.value.fix
    return str(caught.value)


# Resets and reloads.


def test_only_what_a_first_start_made_is_frozen(make_worker, llama, qwen):
    """Later resets need not visit the objects of all modules, and collect the model all the same:
    even one that has come into a cycle."""
    driver = WorkerDriver(make_worker())
    driver.init_device()
    driver.serve("llama")
    driver.reset("MODEL_LOADED")
    driver.profile()
    driver.allocate()
    driver.warm_up()
    for model in ("qwen", "llama"):
        decoder = driver.worker._model.stage
        vars(decoder)["own"] = decoder
        gone = weakref.ref(decoder)
        del decoder
        driver.reset("DEVICE_READY")
        assert gone() is None
        num_frozen = gc.get_freeze_count()
        assert num_frozen > 0
        driver.serve(model)
        assert gc.get_freeze_count() <= num_frozen


@pytest.mark.parametrize("level", ["MODEL_LOADED", "DEVICE_READY", "CREATED"])
def test_reset_to_any_level_and_serve_again(level, make_worker, llama, qwen, prompts, reference):
    driver = WorkerDriver(make_worker())
    driver.init_device()
    driver.serve("llama")
    (prompt,) = prompts([21], vocab_size=97)
    driver.generate(0, prompt, 3)
    driver.reset(level)
    description = driver.worker.describe()
    assert description.kv_cache is None
    assert (description.config is None) == (level != "MODEL_LOADED")
    model = llama if level == "MODEL_LOADED" else qwen
    if level == "CREATED":
        assert description.memory_bytes == {}
        driver.init_device()
    if level == "MODEL_LOADED":
        driver.profile()
        driver.allocate()
        driver.warm_up()
    else:
        driver.serve("qwen")
    assert driver.generate(0, prompt, 8) == reference(model, prompt, 8)


def test_a_smaller_max_model_len_holds_until_it_is_raised_again(loaded, prompts):
    (prompt,) = prompts([30])
    loaded.allocate()
    update = lifecycle.UpdateMaxModelLen
    loaded.worker.update_max_model_len(update(**loaded.ids(), max_model_len=29))
    with pytest.raises(InvalidStepError, match="max_model_len is 29"):
        loaded.execute({0: 30}, [(0, prompt, GREEDY)])
    loaded.worker.on_attach()
    loaded.release(0)
    loaded.worker.update_max_model_len(update(**loaded.ids(), max_model_len=128))
    assert len(loaded.generate(0, prompt, 4)) == 4
    too_long = update(**loaded.ids(), max_model_len=129)
    refused(ConfigError, "max_model_len", loaded.worker.update_max_model_len, too_long)


# Models.


def test_model_outside_the_roots_is_refused(loading, tmp_path_factory):
    elsewhere = tmp_path_factory.mktemp("elsewhere")
    (elsewhere / "config.json").write_text("{}")
    for model in (str(elsewhere), f"../{elsewhere.name}", "/", ".."):
        refused(ConfigError, "model", loading.load_model, model)


def test_link_out_of_the_root_is_refused(loading, model_root, tmp_path_factory):
    elsewhere = tmp_path_factory.mktemp("linked")
    (elsewhere / "config.json").write_text("{}")
    (model_root / "out").symlink_to(elsewhere)
    assert "outside" in refused(ConfigError, "model", loading.load_model, "out")


def test_link_inside_the_root_and_absolute_paths_are_followed(loading, model_root):
    (model_root / "alias").symlink_to("llama")
    for model in ("alias", "./alias/../llama", str(model_root / "llama")):
        assert loading.load_model(model).max_model_len == 128


def test_missing_directory_and_config_are_named(loading, model_root):
    refused(CheckpointError, "model", loading.load_model, "nowhere")
    (model_root / "bare").mkdir()
    assert "config.json" in refused(CheckpointError, "model", loading.load_model, "bare")


@pytest.mark.parametrize("kept", [0.0, 0.4, 0.999])
def test_truncated_shard_is_named(kept, loading, qwen, model_root, copy_config):
    directory = copy_config("truncated")
    (directory / "config.json").write_text((model_root / "qwen" / "config.json").read_text())
    for path in (model_root / "qwen").glob("*.safetensors*"):
        (directory / path.name).write_bytes(path.read_bytes())
    victim = sorted(directory.glob("*.safetensors"))[1]
    content = victim.read_bytes()
    victim.write_bytes(content[: int(len(content) * kept)])
    with pytest.raises(CheckpointError, match=victim.name):
        loading.load_model("truncated")
    victim.unlink()
    with pytest.raises(CheckpointError, match=victim.name):
        loading.load_model("truncated")
    victim.write_bytes(content)
    loading.load_model("truncated")


def test_unknown_architecture_names_the_known_ones(loading, copy_config):
    copy_config("strange", architectures=["BogusForCausalLM"])
    text = refused(ConfigError, "architectures", loading.load_model, "strange")
    assert "BogusForCausalLM" in text
    assert "LlamaForCausalLM" in text


def test_config_field_of_a_wrong_type_is_named(loading, copy_config):
    copy_config("typed", hidden_size="32")
    with pytest.raises(ConfigError, match=r"integer.*hidden_size = '32'"):
        loading.load_model("typed")


def test_max_model_len_beyond_the_model_is_refused(loading):
    assert loading.load_model("llama", max_model_len=100).max_model_len == 100
    text = refused(ConfigError, "max_model_len", loading.load_model, "llama", max_model_len=129)
    assert "128" in text


def test_dynamic_rope_is_exact_up_to_its_length_and_refused_beyond(loading, copy_config):
    rope = {"rope_type": "dynamic", "factor": 4.0, "rope_theta": 1e4}
    copy_config("dynamic", rope_parameters=rope, max_position_embeddings=64)
    options = {"load_format": "dummy"}
    assert loading.load_model("dynamic", **options).max_model_len == 64
    text = refused(
        ConfigError, "max_model_len", loading.load_model, "dynamic", max_model_len=65, **options
    )
    assert "exact only up to" in text


@pytest.mark.parametrize("block_size", [3, 12, 1000])
def test_block_size_must_be_a_power_of_two(loading, block_size):
    cache = config.CacheConfig(block_size=block_size)
    refused(ConfigError, "cache.block_size", loading.load_model, "llama", cache=cache)


def test_batch_must_hold_a_token_of_each_sequence(loading):
    scheduler = config.SchedulerConfig(max_num_seqs=9, max_num_batched_tokens=8)
    field = "scheduler.max_num_batched_tokens"
    refused(ConfigError, field, loading.load_model, "llama", scheduler=scheduler)


def test_a_failed_load_leaves_a_worker_that_loads(loading, copy_config, prompts):
    copy_config("empty")
    with pytest.raises(CheckpointError):
        loading.load_model("empty")
    (prompt,) = prompts([5])
    assert len(loading.serve("llama").generate(0, prompt, 3)) == 3


# Devices and ranks.


@pytest.mark.parametrize("device", ["cuda:999", "mps", "tpu", "meta", "cpu and more"])
def test_unknown_device_is_refused(make_worker, device):
    driver = WorkerDriver(make_worker(device))
    assert device in refused(ConfigError, "device", driver.init_device)


def test_rank_outside_of_the_group_is_refused(make_worker):
    worker = make_worker()
    message = lifecycle.InitDevice(
        epoch=1,
        link=1,
        seq=1,
        parallel=config.ParallelConfig(pipeline_parallel_size=2),
        rendezvous=config.Rendezvous(link=1, place=None, rank=2, local_world_size=1),
        cache=config.CacheConfig(),
        scheduler=config.SchedulerConfig(),
    )
    refused(ConfigError, "rendezvous.rank", worker.init_device, message)
    message = msgspec.structs.replace(
        message, rendezvous=msgspec.structs.replace(message.rendezvous, rank=1)
    )
    refused(ConfigError, "rendezvous.place", worker.init_device, message)


# Plans.


def test_plan_for_other_layers_is_refused(loaded):
    group = loaded.plan().groups[0]
    layers = group.layer_names
    wrong = [layers[:-1], (*layers, "model.layers.3"), (*layers[:-1], "elsewhere"), layers * 2, ()]
    for names in wrong:
        plan = loaded.plan(groups=(msgspec.structs.replace(group, layer_names=names),))
        refused(ConfigError, "kv_cache_config.groups", loaded.allocate, plan)


def test_plan_of_another_size_is_refused(loaded):
    good = loaded.plan()
    for size in (good.size_bytes - 1, 0, 2 * good.size_bytes):
        plan = loaded.plan(size_bytes=size)
        refused(ConfigError, "kv_cache_config.size_bytes", loaded.allocate, plan)
    plan = loaded.plan(block_size=32, size_bytes=2 * good.size_bytes)
    refused(ConfigError, "kv_cache_config.block_size", loaded.allocate, plan)


@pytest.mark.parametrize(("loads", "plans"), [("auto", "float8_e4m3fn"), ("fp8", "float32")])
def test_plan_in_another_dtype_is_refused(loading, loads, plans):
    loading.load_model("llama", cache=config.CacheConfig(kv_cache_dtype=loads))
    group = msgspec.structs.replace(loading.plan().groups[0], dtype=plans)
    plan = loading.plan(groups=(group,))
    refused(ConfigError, "kv_cache_config.groups.dtype", loading.allocate, plan)
    loading.allocate()


def test_one_plan_a_rank(loaded):
    plans = (loaded.plan(),) * 2
    message = lifecycle.InitializeFromConfig(**loaded.ids(), kv_cache_configs=plans)
    refused(ConfigError, "kv_cache_configs", loaded.worker.initialize_from_config, message)


def test_other_block_counts_than_allocated_are_refused(loaded):
    loaded.allocate()
    call = loaded.worker.initialize_cache
    other = lifecycle.InitializeCache(**loaded.ids(), num_gpu_blocks=63)
    refused(ConfigError, "num_gpu_blocks", call, other)
    swapped = lifecycle.InitializeCache(**loaded.ids(), num_gpu_blocks=64, num_cpu_blocks=1)
    refused(ConfigError, "num_cpu_blocks", call, swapped)


def test_kv_cache_that_does_not_fit_is_a_capacity_error(loaded):
    blocks = 2**31 - 1
    size = blocks * 16 * (loaded.plan().size_bytes // (64 * 16))
    plan = loaded.plan(num_blocks=blocks, size_bytes=size)
    refused(CapacityError, "kv_cache_config.size_bytes", loaded.allocate, plan)
    loaded.allocate()


def test_asked_kv_memory_overrides_what_profiling_finds(loading):
    cache = config.CacheConfig(kv_cache_memory_bytes=12345)
    loading.load_model("llama", cache=cache)
    memory = loading.profile()
    assert memory.available_bytes == 12345
    assert memory.activation_peak_bytes >= 0


# Failing steps.


class Faulty:
    """Stands in for a stage's forward: raises once, then is the real one again."""

    def __init__(self, forward, error):
        self.forward = forward
        self.error = error

    def __call__(self, *args):
        if self.error is None:
            return self.forward(*args)
        error, self.error = self.error, None
        raise error


@pytest.fixture
def breaking(ready_worker, monkeypatch):
    """(error) -> the next forward pass of the ready worker raises it."""
    stage = ready_worker._model.stage

    def arm(error):
        monkeypatch.setattr(stage, "forward", Faulty(stage.forward, error))

    return arm


@pytest.mark.parametrize(
    ("raised", "expected"),
    [
        (RuntimeError("made up"), RuntimeError),
        (torch.OutOfMemoryError("made up"), CapacityError),
        (torch.AcceleratorError("made up", 719), DeviceError),
    ],
    ids=["bug", "memory", "device"],
)
def test_failed_step_fails_those_behind_it_until_a_resync(
    raised, expected, serving, breaking, prompts, llama, reference
):
    bystander, victim = prompts([10, 19], seed=20)
    tokens = [serving.execute({0: 10}, [(0, bystander, GREEDY)])[0].token]
    tokens.append(serving.execute({0: 1})[0].token)
    breaking(raised)
    with pytest.raises(expected, match="made up"):
        serving.execute({5: 19}, [(5, victim, GREEDY)])
    failed = serving.seq
    for _ in range(2):
        with pytest.raises(PrecededByError, match=f"step {failed} failed"):
            serving.execute({5: 1})
    healed = serving.execute({0: 1, 6: 19}, [(6, victim, GREEDY)], resync=[0])
    tokens.append(healed[0].token)
    others = [healed[6].token]
    for _ in range(5):
        sampled = serving.execute({0: 1, 6: 1})
        tokens.append(sampled[0].token)
        others.append(sampled[6].token)
    assert tokens == reference(llama, bystander, 8)
    assert others == reference(llama, victim, 6)


def test_refused_step_fails_those_behind_it_and_changes_no_row(serving, prompts, llama, reference):
    (prompt,) = prompts([10], seed=21)
    tokens = [serving.execute({0: 10}, [(0, prompt, GREEDY)])[0].token]
    message, arrays = serving.step({0: 1})
    with pytest.raises(InvalidStepError, match="field arrays"):
        serving.worker.execute_model(message, [b"\0" * 4])
    serving.computed[0] -= 1
    tokens += [serving.execute({0: 1}, resync=[0])[0].token for _ in range(3)]
    assert arrays == []
    assert tokens == reference(llama, prompt, 4)


def test_deferred_step_that_failed_cannot_be_sampled(serving, breaking, prompts):
    (prompt,) = prompts([10], seed=22)
    expected = serving.generate(0, prompt, 3)
    breaking(RuntimeError("made up"))
    with pytest.raises(RuntimeError, match="made up"):
        serving.execute({0: 10}, [(0, prompt, GREEDY)], defer=True)
    with pytest.raises(PrecededByError):
        serving.sample(serving.seq)
    first = serving.execute({0: 10}, [(0, prompt, GREEDY)], resync=[])[0].token
    assert [first] + [serving.execute({0: 1})[0].token for _ in range(2)] == expected


def test_resync_heals_in_the_slot_of_a_deferred_step(serving, breaking, prompts):
    first, second = prompts([10, 12], seed=23)
    expected = serving.generate(0, second, 3)
    serving.execute({0: 10}, [(0, first, GREEDY)], defer=True)
    breaking(RuntimeError("made up"))
    with pytest.raises(RuntimeError, match="made up"):
        serving.execute({3: 12}, [(3, second, GREEDY)])
    token = serving.execute({0: 12}, [(0, second, GREEDY)], resync=[])[0].token
    assert [token] + [serving.execute({0: 1})[0].token for _ in range(2)] == expected


def test_masks_that_do_not_fit_leave_the_step_to_be_sampled(serving, prompts):
    (prompt,) = prompts([10], seed=24)
    expected = serving.generate(0, prompt, 1)
    serving.execute({0: 10}, [(0, prompt, GREEDY)], defer=True)
    waiting = serving.seq
    with pytest.raises(InvalidStepError):
        serving.sample(waiting, {0: [True] * 300})
    assert serving.sample(waiting)[0].token == expected[0]


def test_configuration_is_described_as_it_was_asked_for(serving):
    described = serving.worker.describe()
    assert described.device == "cpu"
    assert described.config.model == config.ModelConfig(model="llama")
    assert described.config.cache.block_size == 16
    assert described.kv_cache.num_blocks == 64
    assert described.memory_bytes["kv_cache"] == described.kv_cache.size_bytes
    assert json.dumps(dict(described.memory_bytes))


@pytest.mark.usefixtures("llama")
def test_file_that_leads_out_of_the_root_is_refused(loading, model_root, tmp_path_factory):
    elsewhere = tmp_path_factory.mktemp("linked")
    linked = model_root / "linked"
    linked.mkdir()
    for file in (model_root / "llama").iterdir():
        (elsewhere / file.name).write_bytes(file.read_bytes())
        (linked / file.name).symlink_to(elsewhere / file.name)
    assert "a link to outside" in refused(ConfigError, "model", loading.load_model, "linked")


@pytest.mark.parametrize("model", ["a\0b", "loop"])
def test_name_that_is_no_path_is_refused(loading, model_root, model):
    if model == "loop":
        (model_root / "loop").symlink_to("loop")
    refused(ConfigError, "model", loading.load_model, model)

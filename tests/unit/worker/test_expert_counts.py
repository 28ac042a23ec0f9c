"""A worker's counts of the tokens that choose each expert, against transformers' routers: through
chunks, padded decodes, warm-ups and dummy steps; what keeps them, and what begins them anew."""

import json

import numpy as np
import pytest
from worker_driver import WorkerDriver

from rpc_schema import lifecycle as lc
from rpc_schema import weight_transfer as wt
from rpc_schema.config import SchedulerConfig
from rpc_schema.step import ExecuteDummyBatch
from tests.support.checkpoints import VOCAB_SIZE, make_checkpoint
from tests.support.expert_counts import NearTie, expected_loads, read_counts
from worker_client.requests import SamplingParams
from worker_daemon.runner.step_layout import StepLadder, decode_sizes, mixed_plans

GREEDY = SamplingParams()
NUM_REQUESTS = 5
"""A number that is no graph size: decodes of it are padded by three rows."""
CHUNK = 7


@pytest.fixture(scope="module")
def checkpoints(model_root):
    made = {}

    def get(architecture, seed=1, **fields):
        key = (architecture, seed)
        if key not in made:
            fields = {"num_hidden_layers": 3, **fields}
            made[key] = make_checkpoint(model_root, architecture, seed=seed, **fields)
        return made[key]

    return get


@pytest.fixture
def start(make_worker):
    """(checkpoint's name, options of the model) -> a driver of a worker that is READY."""

    def get(name, **options):
        driver = WorkerDriver(make_worker())
        driver.init_device()
        return driver.serve(name, **options)

    return get


def counts(driver):
    assert driver.worker.read_expert_loads()()
    return read_counts(driver.worker.describe().expert_loads())


def pad(driver):
    """Pad the steps to come, as those that graphs replay."""
    ladder = StepLadder(decode_sizes(8), lambda size: [64, 128], mixed_plans(8, 64, 128))
    driver.worker._serving.runner.inputs.pad_by(ladder, ladder.plans)


def serve(driver, num_decodes=4):
    """Serve requests in chunks and decodes; return the tokens that were computed of each."""
    rng = np.random.default_rng()
    prompts = [rng.integers(0, VOCAB_SIZE, int(n)).tolist() for n in rng.integers(3, 20, 5)]
    left = {slot: len(prompt) for slot, prompt in enumerate(prompts)}
    new = [(slot, prompt, GREEDY) for slot, prompt in enumerate(prompts)]
    tokens = {slot: list(prompt) for slot, prompt in enumerate(prompts)}
    while any(left.values()):
        scheduled = {slot: min(CHUNK, own) for slot, own in left.items() if own}
        for slot, sampled in driver.execute(scheduled, new).items():
            tokens[slot].append(sampled.token)
        left = {slot: own - scheduled.get(slot, 0) for slot, own in left.items()}
        new = []
    for _ in range(num_decodes):
        for slot, sampled in driver.execute(dict.fromkeys(range(NUM_REQUESTS), 1)).items():
            tokens[slot].append(sampled.token)
    driver.execute({}, finished=list(range(NUM_REQUESTS)))
    return [own[:-1] for own in tokens.values()]  # the newest token is not computed


def serve_clearly(driver, model):
    """Serve until rounding cannot change an expert; return what is expected of all that ran."""
    before = counts(driver)
    while True:
        served = serve(driver)
        try:
            return before, expected_loads(model, served)
        except NearTie:
            before = counts(driver)


def added(before, more):
    return {
        layer: [a + b for a, b in zip(own, more[layer], strict=True)]
        for layer, own in before.items()
    }


@pytest.mark.parametrize(
    "architecture", ["MixtralForCausalLM", "Qwen2MoeForCausalLM", "Qwen3MoeForCausalLM"]
)
def test_counts_are_those_of_transformers_routers(checkpoints, start, architecture):
    checkpoint = checkpoints(architecture)
    driver = start(checkpoint.name)
    fresh = counts(driver)
    assert fresh and not any(any(own) for own in fresh.values())
    before, more = serve_clearly(driver, checkpoint.model)
    assert counts(driver) == added(before, more)
    pad(driver)
    before, more = serve_clearly(driver, checkpoint.model)
    assert counts(driver) == added(before, more)


def test_only_drivers_steps_count(checkpoints, start):
    checkpoint = checkpoints("Qwen3MoeForCausalLM")
    driver = start(checkpoint.name)
    before, more = serve_clearly(driver, checkpoint.model)
    expected = added(before, more)
    worker = driver.worker
    for is_padded in (False, True):
        if is_padded:
            pad(driver)
        worker.execute_dummy_batch(ExecuteDummyBatch(**driver.ids())).result()
        assert counts(driver) == expected
    driver.warm_up()
    driver.profile()
    assert counts(driver) == expected


def test_a_profile_that_fails_counts_nothing(checkpoints, start, monkeypatch):
    driver = start(checkpoints("MixtralForCausalLM").name)
    runner, ran = type(driver.worker._serving.runner), []
    execute = runner.execute_model

    def fail_later(self, *given):
        ran.append(execute(self, *given))
        raise MemoryError("made up")

    monkeypatch.setattr(runner, "execute_model", fail_later)
    with pytest.raises(MemoryError):
        driver.warm_up()
    assert ran
    assert not any(any(own) for own in counts(driver).values())


@pytest.mark.parametrize("level", [1, 2])
def test_counts_outlive_sleep_and_reloads_of_the_same_weights(checkpoints, start, level):
    checkpoint = checkpoints("Qwen2MoeForCausalLM")
    driver = start(checkpoint.name, enable_sleep_mode=True)
    before, more = serve_clearly(driver, checkpoint.model)
    expected, worker = added(before, more), driver.worker
    worker.sleep(lc.Sleep(**driver.ids(), level=level))
    assert counts(driver) == expected  # read while the weights are not there
    worker.wake_up(lc.WakeUp(**driver.ids()))
    worker.reload_weights(wt.ReloadWeights(**driver.ids()))
    assert counts(driver) == expected
    driver.reset("MODEL_LOADED")
    driver.allocate()
    driver.warm_up()
    assert counts(driver) == expected
    before, more = serve_clearly(driver, checkpoint.model)
    assert counts(driver) == added(before, more)


def test_another_checkpoint_begins_anew(checkpoints, start):
    first, second = (checkpoints("MixtralForCausalLM", seed) for seed in (1, 2))
    driver = start(first.name)
    serve(driver)
    driver.worker.reload_weights(wt.ReloadWeights(**driver.ids(), model=second.name))
    assert not any(any(own) for own in counts(driver).values())
    before, more = serve_clearly(driver, second.model)
    assert counts(driver) == added(before, more)
    kept = driver.worker.describe()
    driver.reset("DEVICE_READY")
    assert driver.worker.describe().expert_loads() == {}
    assert read_counts(kept.expert_loads())  # host memory only: test_padded_steps
    driver.serve(first.name)
    assert not any(any(own) for own in counts(driver).values())


def test_models_without_experts_have_none(start, llama):
    assert counts(start("llama")) == {}


def test_dummy_weights_route_nearly_uniformly(model_root, make_worker):
    """Tokens of prompts choose as many distinct experts as uniform choices have, and none much more
    often, in every layer; so do decodes, unless their tokens repeat."""
    directory = model_root / "many-experts"
    directory.mkdir()
    fields = {
        "architectures": ["Qwen3MoeForCausalLM"],
        "model_type": "qwen3_moe",
        "vocab_size": 2048,
        "hidden_size": 256,
        "intermediate_size": 96,
        "moe_intermediate_size": 32,
        "num_experts": 128,
        "num_experts_per_tok": 8,
        "norm_topk_prob": True,
        "num_hidden_layers": 6,
        "num_attention_heads": 8,
        "num_key_value_heads": 2,
        "head_dim": 32,
        "max_position_embeddings": 256,
        "rms_norm_eps": 1e-6,
        "rope_theta": 10000.0,
        "tie_word_embeddings": False,
    }
    (directory / "config.json").write_text(json.dumps(fields))
    limits = SchedulerConfig(max_num_seqs=8, max_num_batched_tokens=1024)
    driver = WorkerDriver(make_worker(), num_blocks=129, scheduler=limits)
    driver.init_device()
    driver.load_model("many-experts", load_format="dummy", max_model_len=256)
    driver.allocate()
    rng = np.random.default_rng()
    prompts = rng.integers(0, 2048, (8, 100)).tolist()
    driver.execute(
        dict.fromkeys(range(8), 100), [(slot, own, GREEDY) for slot, own in enumerate(prompts)]
    )
    before = np.array([*counts(driver).values()])
    for _ in range(30):
        driver.execute(dict.fromkeys(range(8), 1))
    decoded = np.array([*counts(driver).values()]) - before
    uniform = max(_busiest(rng, 800) for _ in range(8))
    assert (before > 0).mean() > 0.99
    assert (before.max(axis=1) / before.mean(axis=1)).max() < 2 * uniform
    assert (decoded > 0).mean() > 0.95  # a few outputs may repeat themselves


def _busiest(rng, num_tokens):
    """The busiest expert's tokens over the mean, of uniform choices."""
    chosen = np.argsort(rng.random((num_tokens, 128)), axis=1)[:, :8]
    tokens = np.bincount(chosen.flatten(), minlength=128)
    return tokens.max() / tokens.mean()

"""Counts of the tokens that choose each expert, in the status of daemons: those of transformers'
routers however the model is split; what happens to them when a driver dies, and during sleep."""

import json
import re

import numpy as np
import pytest
from typer.testing import CliRunner

from tests.support.checkpoints import decisive_prompts
from tests.support.doomed_driver import NUM_GPU_BLOCKS, Death
from tests.support.expert_counts import NearTie, expected_loads
from tests.support.killed_driver import DriverNursery, Plan, begin
from tests.support.serving import LONG_LEASE, generate, greedy_request, worker_config
from tests.support.waiting import wait_until
from worker_client.__main__ import app
from worker_client.group.expert_loads import loads_by_layer
from worker_client.worker_group import WorkerGroup

ARCHITECTURE = "Qwen2MoeForCausalLM"
FIELDS = {"num_experts": 5, "num_hidden_layers": 4, "mlp_only_layers": [1]}
LAYERS = [0, 2, 3]
TOKENS = 6
LENGTHS = [9, 17, 4]


@pytest.fixture(scope="module")
def model(checkpoint):
    return checkpoint(ARCHITECTURE, seed=101, **FIELDS)


@pytest.fixture(scope="module")
def nursery():
    nursery = DriverNursery()
    yield nursery
    nursery.close()


@pytest.fixture(scope="module")
def clear_prompts(model):
    """Prompts whose tokens' experts no rounding can change, with their continuations' counts."""
    for seed in range(50):
        prompts = decisive_prompts(model, seed, LENGTHS, TOKENS)
        computed = [[*own.tolist(), *model.greedy(own, TOKENS)][:-1] for own in prompts]
        try:
            return prompts, expected_loads(model.model, computed)
        except NearTie:
            continue
    raise AssertionError("no prompts are clear")


@pytest.fixture
def requests(clear_prompts):
    prompts, _ = clear_prompts
    return [greedy_request(f"r{index}", own, TOKENS) for index, own in enumerate(prompts)]


@pytest.fixture
def expected(clear_prompts):
    return clear_prompts[1]


def counts(group, least):
    """The counts, once each layer has at least so many: a status has the last reading if the host
    is busy, and so has the next one."""
    found = {}

    def are_there():
        found.update(read(group))
        return all(sum(own) >= least for own in found.values())

    wait_until(are_there, f"{least} tokens of each layer")
    return found


def read(group):
    return {layer: own.tolist() for layer, own in loads_by_layer(group.get_status()).items()}


def assert_counts(group, expected):
    wait_until(lambda: read(group) == expected, f"the loads are {expected}")


def times(loads, factor):
    return {layer: [factor * count for count in own] for layer, own in loads.items()}


@pytest.mark.parametrize(
    ("pp", "tp", "options"),
    [(2, 1, {}), (1, 2, {}), (1, 2, {"enable_expert_parallel": True})],
    ids=["stages", "ranks", "experts"],
)
def test_counts_of_every_split(serve, model, requests, expected, pp, tp, options):
    sizes = {"max_num_seqs": 4, "max_num_batched_tokens": 8}  # prompts come in chunks
    with serve(model.path, pp, tp, **sizes, **options) as (group, loaded):
        assert_counts(group, times(expected, 0))
        generate(group, loaded, requests)
        group.execute_dummy_batch().result()
        assert_counts(group, expected)
        own = [loads_by_layer([status]) for status in group.get_status()]
        if pp == 2:
            assert [list(layers) for layers in own] == [[0], [2, 3]]
        else:
            assert [list(layers) for layers in own] == [LAYERS] * tp
            assert all(np.array_equal(own[0][layer], own[1][layer]) for layer in LAYERS)


def test_a_killed_driver_and_its_successors(daemons, serve, nursery, model, requests, expected):
    config = worker_config(model.path, 2, 1)
    endpoints = daemons.endpoints(2)
    lines = [
        json.dumps({"id": f"k{i}", "prompt_token_ids": [3, 5, i + 7], "max_tokens": 20})
        for i in range(3)
    ]
    with serve(model.path, 2, num_gpu_blocks=NUM_GPU_BLOCKS):
        pass
    nursery.live(Plan(endpoints, config, lines, death=Death(7, [0, 1], True)))
    with WorkerGroup(endpoints, config.parallel, lease=LONG_LEASE) as group:
        group.attach(keep_requests=True)
        loaded = group.prepare(config, num_gpu_blocks=NUM_GPU_BLOCKS)
        left = counts(group, 1)
        plan = Plan(endpoints, config, lines, adopt=True)
        outputs = list(begin(group, loaded, plan).driver.run())
        assert {len(output.token_ids) for output in outputs} == {20}
        # Every token of the requests but the newest was computed, some of them again.
        adopted = counts(group, 2 * 3 * (3 + 19))
        assert all((np.array(adopted[layer]) >= left[layer]).all() for layer in LAYERS)
        generate(group, loaded, requests)
        more = {layer: np.add(adopted[layer], expected[layer]).tolist() for layer in LAYERS}
        assert_counts(group, more)


def test_sleep_and_other_weights(serve, checkpoint, model, requests, expected):
    other = checkpoint(ARCHITECTURE, seed=102, **FIELDS)
    with serve(model.path, enable_sleep_mode=True) as (group, loaded):
        generate(group, loaded, requests)
        for level in (1, 2):
            group.memory.sleep(level)
            assert_counts(group, expected)
            group.memory.wake_up()
        group.weights.reload(str(model.path))
        assert_counts(group, expected)
        generate(group, loaded, requests)
        assert_counts(group, times(expected, 2))
        group.weights.reload(str(other.path))
        assert_counts(group, times(expected, 0))


def run(*words):
    done = CliRunner().invoke(app, list(map(str, words)), catch_exceptions=False)
    assert done.exit_code == 0, done.stderr
    return done.stdout


def test_the_commands_show_them(serve, model, requests, expected, tmp_path):
    with serve(model.path, max_model_len=64) as (group, loaded):
        generate(group, loaded, requests)
        assert_counts(group, expected)
        endpoint = group.clients[0].endpoint.control
        text = run("status", "--endpoints", endpoint)
        (line,) = re.findall(r"^experts .*", text, re.MULTILINE)
        ratios = {layer: max(own) / np.mean(own) for layer, own in expected.items()}
        assert all(f"{layer}: {ratio:.2f}" in line for layer, ratio in ratios.items())
        (shown,) = json.loads(run("status", "--json", "--endpoints", endpoint))
        assert {each["layer"]: each["counts"] for each in shown["expert_loads"]} == expected
    file = tmp_path / "requests.jsonl"
    prompts = [
        {"id": own.id, "prompt_token_ids": own.prompt.tolist(), "max_tokens": TOKENS}
        for own in requests
    ]
    file.write_text("".join(json.dumps(own) + "\n" for own in prompts))
    shown = run(
        *("bench", "--model", model.path, "--endpoints", endpoint, "--reload", "--json"),
        *("--input", file, "--dtype", "float32", "--max-model-len", 64),
        *("--num-gpu-blocks", 64, "--block-size", 4),
    )
    assert json.loads(shown)["experts"] == {
        "num_layers": len(LAYERS),
        "num_experts": FIELDS["num_experts"],
        "distinct": np.mean([np.count_nonzero(own) for own in expected.values()]),
        "imbalance": pytest.approx(np.mean(list(ratios.values()))),
        "worst_imbalance": pytest.approx(max(ratios.values())),
    }

"""Regular expressions of a checkpoint's quantization_config mean what they mean in Python, and
their cost is bounded whatever they are."""

import json
import random
import time

import pytest

from rpc_schema.errors import ConfigError
from tests.support.fuzz_patterns import (
    CATASTROPHIC,
    FIELD,
    REAL,
    check,
    model_names,
    random_pattern,
)
from tests.support.published import PUBLISHED
from tests.support.quantized import compressed_config
from worker_daemon.models.config import parse_model_config
from worker_daemon.models.decoder import unpacked_tensors
from worker_daemon.models.module_patterns import CPU_S, MAX_CHARS, MAX_PATTERNS, matching_names


@pytest.fixture(scope="module")
def names():
    return model_names()


def ignoring(model, *listed):
    quantization = compressed_config("channel", "dynamic", list(listed))
    return parse_model_config(PUBLISHED[model] | {"quantization_config": quantization})


@pytest.mark.parametrize("pattern", REAL)
def test_published_patterns_match_as_in_python(names, pattern):
    assert check([pattern.removeprefix("re:")], names) == "matched"


def test_catastrophic_pattern_is_refused_in_bounded_time(names):
    pattern, good = random.choice(CATASTROPHIC[:7]), REAL[1].removeprefix("re:")
    assert check([good, pattern, good], names) == "slow"  # checks time, and that other threads ran
    with pytest.raises(ConfigError) as caught:
        ignoring("Qwen/Qwen3-8B", "lm_head", f"re:{pattern}")
    assert caught.value.field == FIELD
    assert caught.value.value == pattern[:300] and "names of the modules" in caught.value.fix


def test_catastrophic_pattern_of_mxfp4_is_refused():
    config = json.loads(json.dumps(GPT_OSS))
    config["quantization_config"] = {
        "quant_method": "mxfp4",
        "modules_to_not_convert": ["lm_head", "model.layers.*mlp", ".?" * 100 + "!"],
    }
    with pytest.raises(ConfigError) as caught:
        parse_model_config(config)
    assert caught.value.field == "quantization_config.modules_to_not_convert"
    assert "too much time" in str(caught.value)


GPT_OSS = {
    "architectures": ["GptOssForCausalLM"],
    "vocab_size": 64,
    "hidden_size": 64,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "head_dim": 32,
    "num_local_experts": 4,
    "num_experts_per_tok": 2,
    "sliding_window": 16,
    "max_position_embeddings": 64,
    "rope_theta": 10000.0,
}


def test_random_patterns_are_matched_or_refused_within_the_bound(names):
    seed = random.SystemRandom().randrange(1 << 30)
    print("seed", seed)
    source = random.Random(seed)
    cheap = [random_pattern(source) for _ in range(200)]
    for pattern in [each for each in cheap if each not in CATASTROPHIC][:8]:
        check([pattern], names)


@pytest.mark.parametrize(
    ("patterns", "problem"),
    [
        (["x"] * (MAX_PATTERNS + 1), "more than"),
        (["y" * (MAX_CHARS + 1)], "more than"),
        (["("], "not a regular expression"),
        ([r"(?P<n>a)(?P<n>b)"], "not a regular expression"),
        ([f"a{{{10**30}}}"], "not a regular expression"),
        (["(" * 500 + ")" * 500], "not a regular expression"),
        (["\ud800["], r"\\ud800\["),
    ],
)
def test_patterns_that_are_wrong_are_refused(names, patterns, problem):
    with pytest.raises(ConfigError, match=problem) as caught:
        matching_names(FIELD, patterns, names)
    assert caught.value.field == FIELD and caught.value.fix
    assert len(str(caught.value).encode()) < 4096


@pytest.mark.parametrize("model", ["microsoft/phi-4", "Qwen/Qwen3-30B-A3B", "google/gemma-3-4b-it"])
def test_every_module_of_a_model_is_offered_to_the_patterns(model):
    plain = parse_model_config(PUBLISHED[model])
    tensors = unpacked_tensors(plain)
    assert unpacked_tensors(ignoring(model, "re:.")) == tensors
    assert unpacked_tensors(ignoring(model, "re:^(?!model)")) != tensors


def test_many_names_cost_little_for_every_module():
    paths = [f"model.layers.{index}.nothing" for index in range(4090)]
    fp8 = {"quant_method": "fp8", "fmt": "e4m3", "weight_block_size": [128, 128]}
    listed = {**fp8, "modules_to_not_convert": [*paths, "model.layers.7", "mlp.down_proj"]}
    config = parse_model_config(PUBLISHED["Qwen/Qwen3-235B-A22B"] | {"quantization_config": listed})
    began = time.process_time()
    covers = config.quantization.covers
    for layer in range(94):
        for expert in range(128):
            name = f"model.layers.{layer}.mlp.experts.{expert}"
            assert covers(f"{name}.up_proj") == covers(f"{name}.gate_proj") == (layer != 7)
    assert not covers("model.layers.3.mlp.down_proj")
    assert time.process_time() - began < CPU_S

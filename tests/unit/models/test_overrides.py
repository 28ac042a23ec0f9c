"""Fields that a driver puts in place of config.json's: as if config.json had them."""

import json

import pytest

from rpc_schema.config import ModelConfig
from rpc_schema.errors import ConfigError
from tests.support.model_configs import MODEL_CONFIGS
from worker_daemon.models.config import read_model_config, read_overrides
from worker_daemon.worker.resolve import resolve_model

YARN = {
    "rope_type": "yarn",
    "rope_theta": 1e6,
    "factor": 4.0,
    "original_max_position_embeddings": 32768,
}
BY_TYPE = {
    "full_attention": {"rope_type": "linear", "rope_theta": 1e6, "factor": 2.0},
    "sliding_attention": {"rope_type": "default", "rope_theta": 2e4},
}
LONGER = {"rope_parameters": YARN, "max_position_embeddings": 131072}
OLD = {"rope_scaling": {"type": "linear", "factor": 3.0}, "rope_theta": 5e5}
CASES = {
    "transformers 4": (MODEL_CONFIGS["glm4-9b"] | OLD, LONGER),
    "transformers 5": (
        {k: v for k, v in MODEL_CONFIGS["olmo2-7b"].items() if k != "rope_theta"}
        | {"rope_parameters": {"rope_type": "default", "rope_theta": 5e5}},
        LONGER,
    ),
    "length alone": (MODEL_CONFIGS["olmo2-7b"], {"max_position_embeddings": 8192}),
    "layer types": (MODEL_CONFIGS["gemma3-12b"], {"rope_parameters": BY_TYPE}),
    "a length of its own": (MODEL_CONFIGS["phi4-14b"], LONGER),
}


def written(directory, config):
    """Write a config.json; return its directory."""
    directory.mkdir()
    (directory / "config.json").write_text(json.dumps(config))
    return directory


@pytest.mark.parametrize("case", CASES)
def test_overrides_are_as_if_config_json_had_them(tmp_path, case):
    config, overrides = CASES[case]
    others = {
        "original_max_position_embeddings",
        "rope_local_base_freq",
        "rope_scaling",
        "rope_theta",
    }
    if "rope_parameters" not in overrides:
        others = set()
    plain = written(tmp_path / "plain", config)
    edited = {k: v for k, v in config.items() if k not in others} | overrides
    expected = read_model_config(written(tmp_path / "edited", edited))
    read = read_model_config(plain, read_overrides(json.dumps(overrides)))
    assert read == expected
    assert read != read_model_config(plain)
    resolved = resolve_model(
        ModelConfig(model=str(plain), dtype="bfloat16", hf_overrides=json.dumps(overrides)),
        [tmp_path],
    )
    assert resolved.decoder == expected
    assert resolved.max_model_len == expected.max_position_embeddings


def test_text_model_of_a_multimodal_checkpoint_gets_them(tmp_path):
    text = {**MODEL_CONFIGS["gemma3-12b"], "model_type": "gemma3_text"}
    whole = {"architectures": ["Gemma3ForConditionalGeneration"], "text_config": text}
    alone = written(tmp_path / "text", MODEL_CONFIGS["gemma3-12b"])
    overrides = {"rope_parameters": BY_TYPE, "max_position_embeddings": 8192}
    expected = read_model_config(alone, overrides)
    assert read_model_config(written(tmp_path / "whole", whole), overrides) == expected


@pytest.mark.parametrize(
    ("text", "field", "said"),
    [
        ("{", "hf_overrides", "valid JSON"),
        ("[" * 100_000, "hf_overrides", "valid JSON"),
        ("[1]", "hf_overrides", "not a JSON object"),
        ('{"hidden_size": 8}', "hf_overrides.hidden_size", "cannot be replaced"),
        ('{"rope_scaling": {}}', "hf_overrides.rope_scaling", "cannot be replaced"),
        ('{"rope_parameters": 5}', "rope_parameters", "object"),
        ('{"rope_parameters": {"rope_type": "odd"}}', "rope_parameters.rope_type", "odd"),
        ('{"max_position_embeddings": "8"}', "max_position_embeddings", "integer"),
        ('{"max_position_embeddings": null}', "max_position_embeddings", "missing"),
    ],
)
def test_wrong_overrides_are_refused_by_name(tmp_path, text, field, said):
    path = written(tmp_path / "model", MODEL_CONFIGS["olmo2-7b"])
    with pytest.raises(ConfigError, match=said) as caught:
        resolve_model(ModelConfig(model=str(path), hf_overrides=text), [tmp_path])
    assert caught.value.field == field
    assert caught.value.fix

"""Pooling as a model's files describe it: architectures, and modules.json."""

import json

import pytest

from rpc_schema.config import ModelConfig
from rpc_schema.errors import CheckpointError, ConfigError
from tests.support.pooling_reference import write_modules
from worker_daemon.models.config import parse_model_config, read_model_config
from worker_daemon.models.safetensors_file import full_name
from worker_daemon.worker.resolve import resolve_model

DECODER = {
    "architectures": ["Qwen2ForCausalLM"],
    "vocab_size": 100,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 128,
}
ENCODER = {**DECODER, "architectures": ["RobertaModel"], "pad_token_id": 1, "hidden_act": "gelu"}


@pytest.mark.parametrize(
    ("changes", "states", "labels", "activation"),
    [
        ({"architectures": ["Qwen2ForSequenceClassification"]}, "last", 2, "softmax"),
        (
            {"architectures": ["Qwen2ForTokenClassification"], "id2label": {"0": "a"}},
            "last",
            1,
            "sigmoid",
        ),
        (
            {
                "architectures": ["Qwen2ForSequenceClassification"],
                "num_labels": 5,
                "problem_type": "multi_label_classification",
            },
            "last",
            5,
            "sigmoid",
        ),
    ],
)
def test_heads_of_classifiers(changes, states, labels, activation):
    config = parse_model_config({**DECODER, **changes})
    head = config.pooler.head
    assert (config.pooler.states, head.num_labels, head.activation) == (states, labels, activation)
    assert not config.generates


def test_an_activation_that_is_not_served_is_named(tmp_path):
    name = "config_sentence_transformers.json"
    classifier = ENCODER | {"architectures": ["RobertaForSequenceClassification"], "num_labels": 1}
    (tmp_path / "config.json").write_text(json.dumps(classifier))
    (tmp_path / name).write_text('{"activation_fn": "torch.nn.Tanh"}')
    (tmp_path / "modules.json").write_text('[{"type": "a.Transformer", "path": ""}]')
    with pytest.raises(ConfigError) as caught:
        read_model_config(tmp_path)
    assert (caught.value.field, caught.value.value) == (f"{name}: activation_fn", "torch.nn.Tanh")
    nested = classifier | {"sentence_transformers": {"activation_fn": 3}}
    with pytest.raises(ConfigError) as caught:
        parse_model_config(nested)
    assert caught.value.field == "sentence_transformers.activation_fn"


def test_a_classifier_of_tokens_is_no_cross_encoder():
    values = ENCODER | {"architectures": ["RobertaForTokenClassification"], "num_labels": 3}
    section = {"sentence_transformers": {"activation_fn": "torch.nn.Identity"}}
    assert parse_model_config(values | section).pooler.head.activation == "softmax"


def test_bare_models_and_encoders_do_not_generate():
    assert parse_model_config(DECODER).generates
    assert not parse_model_config({**DECODER, "architectures": ["Qwen2Model"]}).generates
    encoder = parse_model_config(ENCODER)
    assert not encoder.generates
    assert encoder.max_position_embeddings == 126, "positions begin behind the padding token's"


@pytest.mark.parametrize(
    ("base", "mode", "problem"),
    [
        (DECODER, "cls", "encoder"),
        (DECODER, "max", "pooling_mode_max_tokens"),
        (ENCODER, "max", "pooling_mode_max_tokens"),
    ],
)
def test_modes_that_are_not_supported_are_named(tmp_path, base, mode, problem):
    (tmp_path / "config.json").write_text(json.dumps(base))
    write_modules(tmp_path, mode, 64, normalize=True)
    with pytest.raises(ConfigError, match=problem):
        read_model_config(tmp_path)


def test_newer_form_of_the_pooling_mode(tmp_path):
    (tmp_path / "config.json").write_text(json.dumps(DECODER))
    write_modules(tmp_path, "mean", 64, normalize=False)
    (tmp_path / "1_Pooling" / "config.json").write_text('{"pooling_mode": "lasttoken"}')
    config = read_model_config(tmp_path)
    assert (config.pooler.states, config.pooler.normalize) == ("last", False)
    (tmp_path / "1_Pooling" / "config.json").write_text('{"pooling_mode": "weightedmean"}')
    with pytest.raises(ConfigError, match="pooling_mode"):
        read_model_config(tmp_path)


def test_a_saved_set_pools_as_its_model_does(tmp_path):
    model, saved = tmp_path / "model", tmp_path / "saved"
    model.mkdir()
    saved.mkdir()
    (model / "config.json").write_text(json.dumps(ENCODER))
    write_modules(model, "cls", 64, normalize=False)
    (model / "config_sentence_transformers.json").write_text('{"prompts": {}}')
    resolved = resolve_model(ModelConfig(model=str(model)), [tmp_path])
    for name, content in resolved.config_files.items():
        (saved / name).write_bytes(content)
    assert read_model_config(saved) == resolved.decoder
    again = resolve_model(ModelConfig(model=str(saved)), [tmp_path])
    assert again.config_files == resolved.config_files


def test_a_saved_set_of_a_cross_encoder_scores_as_its_model_does(tmp_path):
    model, saved = tmp_path / "model", tmp_path / "saved"
    model.mkdir()
    saved.mkdir()
    classifier = ENCODER | {"architectures": ["RobertaForSequenceClassification"]}
    (model / "config.json").write_text(json.dumps(classifier))
    (model / "modules.json").write_text('[{"type": "a.Transformer", "path": ""}]')
    activation = '{"activation_fn": "torch.nn.modules.activation.Sigmoid"}'
    (model / "config_sentence_transformers.json").write_text(activation)
    resolved = resolve_model(ModelConfig(model=str(model)), [tmp_path])
    assert resolved.decoder.pooler.head.activation == "sigmoid"
    for name, content in resolved.config_files.items():
        (saved / name).write_bytes(content)
    assert read_model_config(saved) == resolved.decoder


@pytest.mark.parametrize(
    "modules",
    [
        {},
        [],
        [{"type": "a.Transformer", "path": ""}],
        [{"type": "a.Transformer", "path": ""}, {"type": "a.Pooling", "path": "../x"}],
        [{"type": "a.Transformer", "path": "0"}, {"type": "a.Pooling", "path": "1_Pooling"}],
        [
            {"type": "a.Transformer"},
            {"type": "a.Pooling", "path": "1_Pooling"},
            {"type": "a.Dense"},
        ],
        [{"type": 3}, {"type": "a.Pooling", "path": "1_Pooling"}],
        [{"type": "a.Transformer"}, {"type": "a.Pooling", "path": "nowhere"}],
    ],
)
def test_modules_that_are_wrong_are_refused(tmp_path, modules):
    (tmp_path / "config.json").write_text(json.dumps(DECODER))
    write_modules(tmp_path, "mean", 64, normalize=False)
    (tmp_path / "modules.json").write_text(json.dumps(modules))
    with pytest.raises((ConfigError, CheckpointError)):
        read_model_config(tmp_path)


@pytest.mark.parametrize(
    "changes",
    [
        {"hidden_act": "relu"},
        {"is_decoder": True},
        {"position_embedding_type": "relative_key"},
        {
            "sbert_ce_default_activation_function": "torch.nn.modules.activation.ReLU",
            "architectures": ["RobertaForSequenceClassification"],
        },
        {
            "sbert_ce_default_activation_function": "own.package.Sigmoid",
            "architectures": ["RobertaForSequenceClassification"],
        },
        {"problem_type": "guess", "architectures": ["RobertaForSequenceClassification"]},
        {"max_position_embeddings": 2},
        {"id2label": {}, "architectures": ["RobertaForTokenClassification"]},
    ],
)
def test_fields_of_encoders_that_are_not_supported_are_named(changes):
    with pytest.raises(ConfigError) as caught:
        parse_model_config({**ENCODER, **changes})
    assert caught.value.field == next(iter(changes))


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("layers.0.mlp.up_proj.weight", "model.layers.0.mlp.up_proj.weight"),
        ("norm.weight", "model.norm.weight"),
        ("model.norm.weight", "model.norm.weight"),
        ("score.weight", "score.weight"),
        ("bert.embeddings.LayerNorm.gamma", "embeddings.LayerNorm.weight"),
        ("roberta.encoder.layer.0.output.LayerNorm.bias", "encoder.layer.0.output.LayerNorm.bias"),
        ("bert.pooler.dense.bias", "pooler.dense.bias"),
        ("classifier.dense.weight", "classifier.dense.weight"),
    ],
)
def test_tensors_have_one_name(name, expected):
    assert full_name(name) == expected

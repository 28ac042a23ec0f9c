"""The family that docs/adding-a-model.md adds, as it stands there, against transformers."""

import importlib.util
import re
from pathlib import Path

import pytest
import torch
import transformers

from rpc_schema.errors import ConfigError
from tests.support.families import decaying
from worker_daemon.models import registry
from worker_daemon.models.config import parse_model_config

DOCUMENT = (Path(__file__).parents[3] / "docs" / "adding-a-model.md").read_text()
CODE = re.findall(r"^```python\n(.*?)^```$", DOCUMENT, re.MULTILINE | re.DOTALL)
ARCHITECTURE = "SeedOssForCausalLM"
LENGTHS = (1, 5, 40, 13)


@pytest.fixture
def seed_oss(tmp_path, monkeypatch):
    """Puts the document's module into the table."""
    code = CODE[0]
    path = tmp_path / "seed_oss.py"
    path.write_text(code)
    spec = importlib.util.spec_from_file_location("seed_oss", path)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    families = {**registry.FAMILIES, ARCHITECTURE: module.describe}
    monkeypatch.setattr(registry, "FAMILIES", families)


@pytest.mark.usefixtures("seed_oss")
@pytest.mark.parametrize(
    ("tp_size", "switches"),
    [
        (1, {}),
        (2, {"attention_out_bias": True}),
        (2, {"attention_bias": False, "mlp_bias": True, "tie_word_embeddings": True}),
    ],
)
def test_the_family_agrees_with_transformers(
    make_checkpoint,
    random_sequences,
    stages_of,
    paged_run,
    reference_logprobs,
    on_tensor_parallel_ranks,
    tp_size,
    switches,
):
    made = make_checkpoint(ARCHITECTURE, seed=21, head_dim=16, **switches)
    sequences = random_sequences(LENGTHS, seed=22)

    def prefill(tp):
        return paged_run(stages_of(made.path, 2, tp), sequences).prefill()

    expected = reference_logprobs(made.hf_model, sequences)
    for ours in on_tensor_parallel_ranks(tp_size, prefill):
        for logits, reference in zip(ours, expected, strict=True):
            assert torch.allclose(logits.log_softmax(-1), reference, atol=1e-4)


@pytest.mark.usefixtures("seed_oss")
def test_its_defaults_are_those_of_transformers():
    hf = transformers.SeedOssConfig()
    names = (
        "vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers",
        "num_attention_heads", "max_position_embeddings",
    )  # fmt: skip
    required = {name: getattr(hf, name) for name in names}
    config = parse_model_config({"architectures": [ARCHITECTURE], **required})
    assert config.heads.num_key_value_heads == hf.num_key_value_heads
    assert config.heads.head_dim == hf.head_dim
    assert config.eos_token_ids == (hf.eos_token_id,)
    (layer,) = set(config.layers)
    assert layer.attention.qkv_bias == hf.attention_bias
    assert layer.attention.o_bias == hf.attention_out_bias
    assert layer.mlp.mlp_bias == hf.mlp_bias


def test_without_its_row_it_is_refused():
    with pytest.raises(ConfigError, match="not supported"):
        parse_model_config({"architectures": [ARCHITECTURE]})


def test_the_document_s_sums_are_those_of_the_family_of_tests():
    """test_row_states.py compares them with a reference."""
    _, sums = CODE
    assert sums in Path(decaying.__file__).read_text()

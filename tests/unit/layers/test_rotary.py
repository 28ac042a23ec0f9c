"""Rotations in plain torch against transformers' functions: tables of a part of a head, pairs of
halves and of neighbors."""

import random
from types import SimpleNamespace

import pytest
import torch
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS
from transformers.models.glm4 import modeling_glm4
from transformers.models.llama import modeling_llama
from transformers.models.phi3 import modeling_phi3

from worker_daemon.layers.rotary import (
    DefaultRope,
    LinearRope,
    Llama3Rope,
    Rope,
    YarnRope,
    max_table_length,
    rotary_table,
    rotate,
    table_bytes,
)

SEED = random.randrange(1 << 30)
CPU = torch.device("cpu")
HEAD_DIM = 32


def rotated(x: torch.Tensor, table: torch.Tensor, interleaved: bool) -> torch.Tensor:
    """Rotate x [N, heads, D], whose rows have the positions 0 to N - 1."""
    cos, sin = table.unsqueeze(2).unbind(1)
    return rotate(x, cos, sin, interleaved=interleaved)


@pytest.mark.parametrize("rotary_dim", [2, 16, 24, 32])
@pytest.mark.parametrize(
    ("module", "interleaved"), [(modeling_phi3, False), (modeling_glm4, True)], ids=["phi", "glm"]
)
def test_a_part_of_a_head_is_rotated(module, interleaved: bool, rotary_dim: int) -> None:
    generator = torch.Generator().manual_seed(SEED)
    q, k = (torch.randn(1, heads, 7, HEAD_DIM, generator=generator) for heads in (3, 2))
    table = rotary_table(DefaultRope(rotary_dim, 500.0), 7, CPU)
    cos, sin = (half.repeat(1, 2).unsqueeze(0) for half in table.unbind(1))
    expected = module.apply_rotary_pos_emb(q, k, cos, sin)
    for x, reference in zip((q, k), expected, strict=True):
        out = rotated(x.squeeze(0).transpose(0, 1), table, interleaved)
        assert torch.allclose(out.transpose(0, 1), reference.squeeze(0), atol=1e-6)


def test_whole_heads_are_rotated_in_halves() -> None:
    generator = torch.Generator().manual_seed(SEED)
    q, k = (torch.randn(1, heads, 7, HEAD_DIM, generator=generator) for heads in (3, 2))
    table = rotary_table(DefaultRope(HEAD_DIM, 1e4), 7, CPU)
    cos, sin = (half.repeat(1, 2).unsqueeze(0) for half in table.unbind(1))
    expected, _ = modeling_llama.apply_rotary_pos_emb(q, k, cos, sin)
    out = rotated(q.squeeze(0).transpose(0, 1), table, interleaved=False)
    assert torch.allclose(out.transpose(0, 1), expected.squeeze(0), atol=1e-6)


@pytest.mark.parametrize("interleaved", [False, True])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_rotated_elements_are_rounded_once_and_others_not_at_all(
    dtype: torch.dtype, interleaved: bool
) -> None:
    x = torch.randn(5, 2, HEAD_DIM, generator=torch.Generator().manual_seed(SEED)).to(dtype)
    table = rotary_table(DefaultRope(20, 100.0), 5, CPU)
    out = rotated(x, table, interleaved)
    assert out.dtype == dtype
    assert torch.equal(out[..., 20:], x[..., 20:])
    assert torch.equal(out, rotated(x.float(), table, interleaved).to(dtype))


ORIGINAL = {"original_max_position_embeddings": 64}
LLAMA3 = {"factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0, **ORIGINAL}


@pytest.mark.parametrize("share", [0.5, 0.75, 1.0])
@pytest.mark.parametrize(
    ("rope_type", "parameters", "make"),
    [
        ("linear", {"factor": 3.0}, LinearRope),
        ("llama3", LLAMA3, Llama3Rope),
        ("yarn", {"factor": 4.0, **ORIGINAL}, YarnRope),
    ],
)
def test_frequencies_of_a_part_are_those_of_transformers(
    rope_type: str, parameters: dict[str, float], make: type, share: float
) -> None:
    every = {"rope_theta": 5e4, "partial_rotary_factor": share, "rope_type": rope_type}
    config = SimpleNamespace(
        head_dim=HEAD_DIM,
        hidden_size=128,
        num_attention_heads=4,
        max_position_embeddings=256,
        rope_parameters={**every, **parameters},
        standardize_rope_params=lambda: None,
    )
    expected, scaling = ROPE_INIT_FUNCTIONS[rope_type](config, CPU)
    rope: Rope = make(int(HEAD_DIM * share), 5e4, **parameters)
    assert torch.allclose(rope.inv_freq(), expected, rtol=1e-6)
    assert rope.attention_scaling == pytest.approx(scaling)


def test_all_tables_count() -> None:
    ropes = [DefaultRope(64, 1e4), LinearRope(32, 1e6, 8.0)]
    tables = [rotary_table(rope, 100, CPU) for rope in ropes]
    assert table_bytes(ropes, 100) == sum(table.nbytes for table in tables)
    assert max_table_length(ropes) < max_table_length(ropes[:1]) < max_table_length(())

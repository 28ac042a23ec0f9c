"""Adapters from disk: the shards of every rank make up the adapter, and each fault is refused by
name."""

import json
import math

import pytest
import torch
from safetensors.torch import load_file, save_file

from rpc_schema.errors import CheckpointError, ConfigError
from tests.support.lora_adapters import config_of, write_adapter
from worker_daemon.distributed.tp import tensor_parallel
from worker_daemon.layers.adapters import AdapterLayout
from worker_daemon.layers.attention import NullAttention
from worker_daemon.layers.torch_ops import TorchOps
from worker_daemon.lora.adapter_files import AdapterFormat
from worker_daemon.models.config import parse_model_config
from worker_daemon.models.decoder import build_stage

MODEL = {
    "architectures": ["LlamaForCausalLM"],
    "vocab_size": 64,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 64,
    "rms_norm_eps": 1e-5,
    "rope_parameters": {"rope_type": "default", "rope_theta": 1e4},
    "tie_word_embeddings": False,
}
MAX_RANK = 6
SHAPES = {
    "self_attn.q_proj": (32, 32),
    "self_attn.k_proj": (16, 32),
    "self_attn.v_proj": (16, 32),
    "self_attn.o_proj": (32, 32),
    "mlp.gate_proj": (48, 32),
    "mlp.up_proj": (48, 32),
    "mlp.down_proj": (32, 48),
}
MODULES = {f"model.layers.{layer}.{name}": s for layer in range(3) for name, s in SHAPES.items()}


def layout_of(layers=range(3), rank=0, size=1, max_rank=MAX_RANK):
    layout = AdapterLayout(2, max_rank)
    build_stage(
        parse_model_config(MODEL), layers, True, True, tensor_parallel(rank, size), torch.float32,
        torch.device("meta"), 64, NullAttention(), TorchOps(), layout,
    )  # fmt: skip
    return layout


WHOLE = layout_of(max_rank=1)


def reader(layout, dtype=torch.float32):
    return AdapterFormat(layout, WHOLE.shapes, dtype, pinned=False)


def tensors_of(modules, rank=4, seed=0):
    generator = torch.Generator().manual_seed(seed)
    tensors = {}
    for module in modules:
        outputs, inputs = MODULES[module]
        prefix = f"base_model.model.{module}"
        tensors[f"{prefix}.lora_A.weight"] = torch.randn(rank, inputs, generator=generator)
        tensors[f"{prefix}.lora_B.weight"] = torch.randn(outputs, rank, generator=generator)
    return tensors


@pytest.fixture
def adapter(tmp_path):
    """A sound adapter of two modules a layer."""
    modules = [name for name in MODULES if name.endswith(("k_proj", "down_proj"))]
    write_adapter(tmp_path, config_of(4, 2.0, ("k_proj", "down_proj")), tensors_of(modules))
    return tmp_path


def test_the_model_has_these_modules():
    assert WHOLE.shapes == MODULES


@pytest.mark.parametrize("size", [1, 2, 4])
@pytest.mark.parametrize("layers", [range(3), range(1, 3)])
def test_shards_add_up_to_the_adapter(adapter, layers, size):
    """Summed over the ranks where inputs are split, joined where outputs are."""
    given = load_file(adapter / "adapter_model.safetensors")
    products = {module: torch.zeros(MODULES[module]) for module in MODULES}
    for rank in range(size):
        layout = layout_of(layers, rank, size)
        files = reader(layout).read(adapter)
        assert max(each.rank for each in files.modules.values()) == 4
        slots = files.weights.unsqueeze(0)
        for merged in layout.merged:
            a, b = merged.a_of(slots)[0], merged.b_of(slots)[0]
            for index, shard in enumerate(merged.shards):
                own = a[index * MAX_RANK : (index + 1) * MAX_RANK]
                parts = (b[shard.target] @ own).split([r.stop - r.start for r in shard.rows])
                for rows, part in zip(shard.rows, parts, strict=True):
                    products[shard.module][rows, shard.columns] = part
    for module, found in products.items():
        prefix = f"base_model.model.{module}.lora"
        is_here = f"{prefix}_A.weight" in given and int(module.split(".")[2]) in layers
        a, b = (given.get(f"{prefix}_{side}.weight") for side in "AB")
        expected = 0.5 * b @ a if is_here else torch.zeros_like(found)
        torch.testing.assert_close(found, expected)


def test_rank_and_alpha_of_a_module(tmp_path):
    """Patterns match suffixes at dots, the first one wins; rsLoRA divides by the root."""
    names = ["model.layers.1.mlp.up_proj", "model.layers.2.mlp.up_proj"]
    tensors = tensors_of(names[:1], rank=2) | tensors_of(names[1:], rank=5)
    fields = {
        "rank_pattern": {"1.mlp.up_proj": 2, "up_proj": 5, "mlp.up_proj": 1},
        "alpha_pattern": {"p_proj": 9, "2.mlp.up_proj": 3.0},
        "use_rslora": True,
    }
    write_adapter(tmp_path, config_of(3, 6, ["up_proj"], **fields), tensors)
    layout = layout_of()
    weights = reader(layout).read(tmp_path).weights.unsqueeze(0)
    for name, rank, alpha in zip(names, (2, 5), (6.0, 3.0), strict=True):
        (merged,) = (m for m in layout.merged if any(s.module == name for s in m.shards))
        (shard,) = (shard for shard in merged.shards if shard.module == name)
        b = tensors[f"base_model.model.{name}.lora_B.weight"]
        found = merged.b_of(weights)[0][shard.target]
        torch.testing.assert_close(found[:, :rank], b * (alpha / math.sqrt(rank)))
        assert not found[:, rank:].any()


@pytest.mark.parametrize(
    ("fields", "field"),
    [
        ({"r": 7}, "rank"),
        ({"rank_pattern": {"k_proj": 9}}, "rank"),
        ({"rank_pattern": {"k_.*": 2}}, "rank_pattern"),
        ({"rank_pattern": [3]}, "rank_pattern"),
        ({"r": 0}, "r"),
        ({"lora_alpha": "x"}, "lora_alpha"),
        ({"bias": "all"}, "bias"),
        ({"use_dora": True}, "use_dora"),
        ({"lora_bias": True}, "lora_bias"),
        ({"modules_to_save": ["lm_head"]}, "modules_to_save"),
        ({"init_lora_weights": "pissa_niter_16"}, "init_lora_weights"),
        ({"init_lora_weights": "olora"}, "init_lora_weights"),
        ({"init_lora_weights": "corda"}, "init_lora_weights"),
        ({"init_lora_weights": "loftq"}, "init_lora_weights"),
        ({"alora_invocation_tokens": [1, 2]}, "alora_invocation_tokens"),
        ({"layer_replication": [[0, 2]]}, "layer_replication"),
        ({"target_modules": ["k_proj", "router"]}, "target_modules"),
        ({"peft_type": "IA3"}, "peft_type"),
    ],
)
def test_what_is_not_supported_is_refused_by_name(adapter, fields, field):
    path = adapter / "adapter_config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | fields))
    with pytest.raises(ConfigError) as raised:
        reader(layout_of()).read(adapter)
    assert raised.value.field == field
    assert raised.value.fix


def test_a_configuration_is_a_small_json_object(adapter):
    path = adapter / "adapter_config.json"
    for text in ("", "[1]", "{" * 5000, " " * (2 << 20)):
        path.write_text(text)
        with pytest.raises(CheckpointError, match="adapter_config"):
            reader(layout_of()).read(adapter)
    path.unlink()
    with pytest.raises(CheckpointError, match="adapter_config"):
        reader(layout_of()).read(adapter)


K = "base_model.model.model.layers.0.self_attn.k_proj.lora_"


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({f"{K}A.weight": torch.zeros(4, 31)}, "not [4, 32]"),
        ({f"{K}B.weight": torch.zeros(16, 3)}, "not [16, 4]"),
        ({f"{K}B.weight": torch.zeros(32, 4)}, "not [16, 4]"),
        ({f"{K}A.weight": torch.zeros(4, 32, dtype=torch.int8)}, "has dtype I8"),
        ({f"{K}B.weight": None}, "has only its lora_A"),
        ({f"{K}A.weight": torch.full((4, 32), torch.nan)}, "not finite"),
        ({"base_model.model.lm_head.lora_A.weight": torch.zeros(4, 32)}, "lm_head"),
        ({f"{K}magnitude_vector": torch.zeros(16)}, "magnitude_vector"),
        (
            {"base_model.model.model.layers.3.mlp.up_proj.lora_A.weight": torch.zeros(4, 32)},
            "3.mlp",
        ),
    ],
)
def test_wrong_tensors_are_refused(adapter, changes, message):
    path = adapter / "adapter_model.safetensors"
    tensors = {**load_file(path), **changes}
    save_file({name: each for name, each in tensors.items() if each is not None}, path)
    with pytest.raises(CheckpointError) as raised:
        reader(layout_of()).read(adapter)
    assert message in str(raised.value)


def test_files_that_are_no_adapters(adapter):
    path = adapter / "adapter_model.safetensors"
    whole = path.read_bytes()
    for content in (b"", whole[:-1], whole + b"x", b"\xff" * 64, whole[:40]):
        path.write_bytes(content)
        with pytest.raises(CheckpointError, match="safetensors"):
            reader(layout_of()).read(adapter)
    save_file({}, path)
    with pytest.raises(CheckpointError, match="no tensors"):
        reader(layout_of()).read(adapter)
    path.unlink()
    path.mkdir()
    with pytest.raises(CheckpointError, match="cannot be read"):
        reader(layout_of()).read(adapter)


def test_values_that_overflow_the_models_dtype(adapter):
    path = adapter / "adapter_model.safetensors"
    tensors = load_file(path)
    tensors[f"{K}A.weight"][0, 0] = 1e6
    save_file(tensors, path)
    reader(layout_of(), torch.bfloat16).read(adapter)
    with pytest.raises(CheckpointError, match="not finite"):
        reader(layout_of(), torch.float16).read(adapter)

"""Scales of a KV cache in FP8 in checkpoints: their names and forms, and the heads of each rank."""

import json
import random

import pytest
import torch
from safetensors.torch import save_file

from rpc_schema.errors import CheckpointError
from worker_daemon.distributed.tp import tensor_parallel
from worker_daemon.layers.kv_scales import HeadScales
from worker_daemon.layers.setup import LayerSetup
from worker_daemon.layers.torch_ops import TorchOps
from worker_daemon.models.kv_scales import load_kv_scales

HEADS = 4
PREFIX = "model.layers.{}.self_attn"


def make_scales(layer: int = 0, rank: int = 0, size: int = 1) -> HeadScales:
    tp = tensor_parallel(rank, size)
    setup = LayerSetup(8, tp, torch.bfloat16, torch.device("cpu"), TorchOps(), None, True)
    count = max(1, HEADS // size)
    return HeadScales(PREFIX.format(layer), HEADS, rank * HEADS // size, count, setup)


@pytest.fixture
def write(tmp_path):
    """write(tensors) -> a directory with these tensors of layer 0, by their names below it."""

    def write(tensors):
        named = {f"{PREFIX.format(0)}.{name}": value for name, value in tensors.items()}
        save_file({**named, "model.norm.weight": torch.ones(8)}, tmp_path / "model.safetensors")
        return tmp_path

    return write


def drawn(*shape):
    values = torch.rand(shape, generator=torch.Generator().manual_seed(random.randrange(1 << 30)))
    return values + 0.1


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("shape", [(), (1,), (1, 1)])
@pytest.mark.parametrize(
    ("key", "value"), [("k_scale", "v_scale"), ("k_proj.k_scale", "v_proj.v_scale")]
)
def test_one_value_serves_all_heads(write, dtype, shape, key, value):
    of_keys, of_values = drawn(*shape).to(dtype), drawn(*shape).to(dtype)
    scales = make_scales()
    names = load_kv_scales([scales], write({key: of_keys, value: of_values}))
    assert scales.values.dtype == torch.float32
    assert scales.values[0].tolist() == [of_keys.item()] * HEADS
    assert scales.values[1].tolist() == [of_values.item()] * HEADS
    assert names == {f"{PREFIX.format(0)}.{name}" for name in (key, value)}


@pytest.mark.parametrize(("size", "rank"), [(1, 0), (2, 1), (4, 3), (8, 5)])
@pytest.mark.parametrize("shape", [(HEADS,), (HEADS, 1, 1)])
def test_each_rank_takes_its_heads(write, size, rank, shape):
    tensors = {"k_scale": drawn(*shape), "v_scale": drawn(*shape)}
    scales = make_scales(rank=rank, size=size)
    load_kv_scales([scales], write(tensors))
    first = rank * HEADS // size
    for row, name in zip(scales.values, tensors, strict=True):
        own = tensors[name].flatten()[first : first + max(1, HEADS // size)]
        assert torch.equal(row, own)


def test_a_single_scale_serves_keys_and_values(write):
    kv_scale = drawn()
    scales = make_scales()
    load_kv_scales([scales], write({"kv_scale": kv_scale}))
    assert scales.values.flatten().tolist() == [kv_scale.item()] * (2 * HEADS)


def test_absent_scales_are_1(write):
    """Of another layer, or of the values alone; also if other scales were loaded before."""
    of_keys = drawn(1)
    scales = [make_scales(0), make_scales(1)]
    for each in scales:
        each.parameter.data.fill_(7.0)
    names = load_kv_scales(scales, write({"k_scale": of_keys}))
    assert len(names) == 1
    assert scales[0].values[0].tolist() == [of_keys.item()] * HEADS
    assert scales[0].values[1].tolist() == [1.0] * HEADS
    assert scales[1].values.flatten().tolist() == [1.0] * (2 * HEADS)


def test_a_sharded_checkpoint(tmp_path):
    name = f"{PREFIX.format(0)}.v_scale"
    value = drawn(1)
    save_file({name: value}, tmp_path / "b.safetensors")
    save_file({"model.norm.weight": torch.ones(8)}, tmp_path / "a.safetensors")
    weight_map = {name: "b.safetensors", "model.norm.weight": "a.safetensors"}
    index = tmp_path / "model.safetensors.index.json"
    index.write_text(json.dumps({"weight_map": weight_map}))
    scales = make_scales()
    load_kv_scales([scales], tmp_path)
    assert scales.values[1].tolist() == [value.item()] * HEADS


@pytest.mark.parametrize("bad", [0.0, -1.0, float("nan"), float("inf")])
def test_values_that_are_no_scales_are_refused(write, bad):
    values = drawn(HEADS)
    values[random.randrange(HEADS)] = bad
    with pytest.raises(CheckpointError, match="above 0 and finite") as raised:
        load_kv_scales([make_scales()], write({"v_scale": values}))
    assert raised.value.field == f"{PREFIX.format(0)}.v_scale"


@pytest.mark.parametrize("shape", [(0,), (2,), (HEADS + 1,), (HEADS, 2)])
def test_other_numbers_of_values_are_refused(write, shape):
    with pytest.raises(CheckpointError, match="for 4 KV heads"):
        load_kv_scales([make_scales()], write({"k_scale": drawn(*shape)}))

"""4-bit checkpoints made from unquantized ones, and the reference model with their weights.

    quantize(checkpoint.path, checkpoint.model, Scheme("awq", 32))

Packing and dequantization follow the formats' definitions, a column and a word at a time, without
the daemon's code.
"""

import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
import transformers
from safetensors.torch import load_file, save_file

from tests.support.quantized import LAYER_MATRICES

AWQ_ORDER = (0, 2, 4, 6, 1, 3, 5, 7)


@dataclass(frozen=True)
class Scheme:
    """A format and its options."""

    form: str
    """awq, gptq, gptq_v2 or compressed"""
    group_size: int
    """-1: whole rows"""
    symmetric: bool = False
    act_order: bool = False

    def __str__(self) -> str:
        kind = "symmetric" if self.symmetric else "zeros"
        return f"{self.form}-{self.group_size}-{kind}" + ("-order" if self.act_order else "")


def quantize(
    path: Path,
    model: transformers.PreTrainedModel,
    scheme: Scheme,
    ignore: Sequence[str] = (),
    scale_dtype: torch.dtype = torch.float16,
) -> None:
    """Replace the checkpoint in `path` with a 4-bit one, and the model's weights with those that it
    stands for. ignore: complete names of matrices that stay unquantized."""
    stored, weights = {}, dict(model.named_parameters())
    orders: dict[str, torch.Tensor] = {}
    for name, tensor in load_file(path / "model.safetensors").items():
        module = name.removesuffix(".weight")
        if not (module.endswith(LAYER_MATRICES) and name.endswith(".weight")) or module in ignore:
            stored[name] = tensor
            continue
        size = tensor.shape[1] if scheme.group_size == -1 else scheme.group_size
        groups = torch.arange(tensor.shape[1]) // size
        if scheme.act_order:  # matrices of one input have one order
            shared = f"{module.rpartition('.')[0]}-{tensor.shape[1]}-{module.endswith('o_proj')}"
            groups = orders.setdefault(shared, groups[torch.randperm(tensor.shape[1])])
        values, scale, zero = quantized_values(tensor, groups, scheme.symmetric, scale_dtype)
        restored = (values - zero[:, groups]) * scale.float()[:, groups]
        with torch.no_grad():
            weights[name].copy_(restored)
        packed = PACK[scheme.form](values, scale, zero, groups, scheme)
        stored.update({f"{module}.{suffix}": part for suffix, part in packed.items()})
    save_file(stored, path / "model.safetensors")
    config = json.loads((path / "config.json").read_text())
    config["quantization_config"] = int4_config(scheme, ignore)
    (path / "config.json").write_text(json.dumps(config))


def quantized_values(
    weight: torch.Tensor, groups: torch.Tensor, symmetric: bool, scale_dtype: torch.dtype
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Return values [M, K] from 0 to 15 (int64), scales [M, G] and zero points [M, G]."""
    count = int(groups.max()) + 1
    scale, zero = torch.empty(2, weight.shape[0], count)
    for group in range(count):
        part = weight[:, groups == group].float()
        low, high = part.amin(1).clamp(max=0), part.amax(1).clamp(min=0)
        if symmetric:
            scale[:, group] = torch.maximum(high, -low) / 7.5
            zero[:, group] = 8
        else:
            scale[:, group] = (high - low) / 15
            zero[:, group] = (-low / scale[:, group]).round().clamp(0, 15)
    scale = scale.to(scale_dtype)
    values = (weight.float() / scale.float()[:, groups] + zero[:, groups]).round().clamp(0, 15)
    return values.long(), scale, zero.long()


def words(values: torch.Tensor, axis: int, order: Sequence[int] = range(8)) -> torch.Tensor:
    """Pack eight neighbors along an axis into an int32; order: the one in each four bits."""
    by_word = values.movedim(axis, 0).reshape(-1, 8, *values.movedim(axis, 0).shape[1:])
    packed = torch.zeros_like(by_word[:, 0])
    for place, index in enumerate(order):
        packed |= by_word[:, index] << (4 * place)
    signed = torch.where(packed >= 1 << 31, packed - (1 << 32), packed)
    return signed.to(torch.int32).movedim(0, axis).contiguous()


def _pack_awq(values, scale, zero, groups, scheme):  # type: ignore[no-untyped-def]
    return {
        "qweight": words(values.T, 1, AWQ_ORDER),
        "qzeros": words(zero.T, 1, AWQ_ORDER),
        "scales": scale.T.contiguous(),
    }


def _pack_gptq(values, scale, zero, groups, scheme):  # type: ignore[no-untyped-def]
    stored = words(zero.T, 1)
    if scheme.form == "gptq":
        stored = stored - 0x11111111
    return {
        "qweight": words(values.T, 0),
        "qzeros": stored,
        "scales": scale.T.contiguous(),
        "g_idx": groups.to(torch.int32),
    }


def _pack_compressed(values, scale, zero, groups, scheme):  # type: ignore[no-untyped-def]
    packed = {
        "weight_packed": words(values, 1),
        "weight_scale": scale,
        "weight_shape": torch.tensor(values.shape),
    }
    if not scheme.symmetric:
        packed["weight_zero_point"] = words(zero, 0)
    if scheme.act_order:
        packed["weight_g_idx"] = groups.to(torch.int32)
    return packed


PACK = {
    "awq": _pack_awq,
    "gptq": _pack_gptq,
    "gptq_v2": _pack_gptq,
    "compressed": _pack_compressed,
}


def int4_config(scheme: Scheme, ignore: Sequence[str] = ()) -> dict[str, object]:
    """Return quantization_config as the format's quantizer writes it."""
    if scheme.form == "awq":
        return {
            "quant_method": "awq",
            "bits": 4,
            "group_size": scheme.group_size,
            "version": "gemm",
            "zero_point": True,
            "modules_to_not_convert": list(ignore) or None,
        }
    if scheme.form.startswith("gptq"):
        return {
            "quant_method": "gptq",
            "bits": 4,
            "group_size": scheme.group_size,
            "desc_act": scheme.act_order,
            "sym": scheme.symmetric,
            "checkpoint_format": scheme.form,
            "lm_head": False,
            "damp_percent": 0.1,
            "true_sequential": True,
        }
    weights = {
        "num_bits": 4,
        "type": "int",
        "symmetric": scheme.symmetric,
        "dynamic": False,
        "strategy": "channel" if scheme.group_size == -1 else "group",
        "group_size": None if scheme.group_size == -1 else scheme.group_size,
        "actorder": "group" if scheme.act_order else None,
        "observer": "minmax",
        "block_structure": None,
    }
    return {
        "quant_method": "compressed-tensors",
        "format": "pack-quantized",
        "quantization_status": "compressed",
        "kv_cache_scheme": None,
        "ignore": ["lm_head", *ignore],
        "config_groups": {
            "group_0": {
                "targets": ["Linear"],
                "weights": weights,
                "input_activations": None,
                "output_activations": None,
            }
        },
    }

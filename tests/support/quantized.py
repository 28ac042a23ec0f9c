"""FP8 checkpoints made from unquantized ones, and the reference model with the dequantized weights.

    quantize(checkpoint.path, checkpoint.model, "compressed", "channel", "dynamic")

The quantization here is independent of the daemon's code: w = fp8 * scale, computed with NumPy-like
torch operations for each tensor of the checkpoint.
"""

import json
from collections.abc import Mapping, Sequence
from pathlib import Path

import torch
import transformers
from safetensors.torch import load_file, save_file

LARGEST = 448.0
BLOCK = 128
LAYER_MATRICES = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")


def quantize(
    path: Path,
    model: transformers.PreTrainedModel,
    method: str,
    strategy: str,
    activations: str = "dynamic",
    ignore: Sequence[str] = (),
    scale_dtype: torch.dtype = torch.float32,
) -> None:
    """Replace the checkpoint in `path` with an FP8 one, and the model's weights with those that it
    stands for.

    method: "compressed" (compressed-tensors), "fp8" (Hugging Face's) or "modelopt". strategy:
    "tensor", "channel" or "block". activations: "none", "dynamic" or "static". ignore: complete
    names of matrices that stay unquantized.
    """
    tensors = load_file(path / "model.safetensors")
    weights = dict(model.named_parameters())
    stored = {}
    for name, tensor in tensors.items():
        module = name.removesuffix(".weight")
        is_quantized = module.endswith(LAYER_MATRICES) and name.endswith(".weight")
        if not is_quantized or module in ignore:
            stored[name] = tensor
            continue
        values, scale, restored = quantized_values(tensor, strategy, scale_dtype)
        suffix = "weight_scale_inv" if method == "fp8" and strategy == "block" else "weight_scale"
        stored[name] = values
        is_vector = method == "modelopt" and strategy == "channel"
        stored[f"{module}.{suffix}"] = scale.flatten() if is_vector else scale
        if activations == "static":
            stored[f"{module}.input_scale"] = torch.rand(1).squeeze() / 20 + 0.02
        with torch.no_grad():
            _matrix(weights, name).copy_(restored)
    save_file(stored, path / "model.safetensors")
    if method == "modelopt":
        file = path / "hf_quant_config.json"
        file.write_text(json.dumps(modelopt_config(strategy, activations, ignore)))
        return
    config = json.loads((path / "config.json").read_text())
    make = compressed_config if method == "compressed" else fp8_config
    config["quantization_config"] = make(strategy, activations, ignore)
    (path / "config.json").write_text(json.dumps(config))


def _matrix(weights: Mapping[str, torch.Tensor], name: str) -> torch.Tensor:
    """Return the model's matrix of this name; the model has the experts' stacked."""
    if name in weights:
        return weights[name]
    prefix, _, rest = name.partition(".experts.")
    expert, matrix, _ = rest.split(".")
    if matrix == "down_proj":
        return weights[f"{prefix}.experts.down_proj"][int(expert)]
    both = weights[f"{prefix}.experts.gate_up_proj"][int(expert)]
    return both.chunk(2)[matrix == "up_proj"]


def quantized_values(
    weight: torch.Tensor, strategy: str, scale_dtype: torch.dtype = torch.float32
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Return the values in FP8, the scales as the checkpoint has them, and their product in
    float32."""
    if strategy == "tensor":
        scale = (weight.abs().max() / LARGEST).to(scale_dtype)
        spread = scale.float().expand(weight.shape)
    elif strategy == "channel":
        scale = (weight.abs().amax(1, keepdim=True) / LARGEST).to(scale_dtype)
        spread = scale.float().expand(weight.shape)
    else:
        rows, columns = weight.shape
        spread = torch.empty_like(weight)
        scale = torch.empty(-(-rows // BLOCK), -(-columns // BLOCK))
        for i in range(scale.shape[0]):
            for j in range(scale.shape[1]):
                part = (slice(i * BLOCK, (i + 1) * BLOCK), slice(j * BLOCK, (j + 1) * BLOCK))
                scale[i, j] = weight[part].abs().max() / LARGEST
        scale = scale.to(scale_dtype)
        for i in range(scale.shape[0]):
            for j in range(scale.shape[1]):
                part = (slice(i * BLOCK, (i + 1) * BLOCK), slice(j * BLOCK, (j + 1) * BLOCK))
                spread[part] = scale[i, j].float()
    values = (weight / spread).clamp(-LARGEST, LARGEST).to(torch.float8_e4m3fn)
    return values, scale, values.float() * spread


def compressed_config(strategy: str, activations: str, ignore: Sequence[str]) -> dict[str, object]:
    """Return quantization_config as compressed-tensors writes it."""
    weights = {
        "num_bits": 8,
        "type": "float",
        "symmetric": True,
        "dynamic": False,
        "strategy": strategy,
        "group_size": None,
        "actorder": None,
        "observer": "minmax",
        "block_structure": [BLOCK, BLOCK] if strategy == "block" else None,
    }
    inputs = {
        "num_bits": 8,
        "type": "float",
        "symmetric": True,
        "dynamic": activations == "dynamic",
        "strategy": "token" if activations == "dynamic" else "tensor",
    }
    return {
        "quant_method": "compressed-tensors",
        "format": "float-quantized",
        "quantization_status": "compressed",
        "kv_cache_scheme": None,
        "ignore": ["lm_head", *ignore],
        "config_groups": {
            "group_0": {
                "targets": ["Linear"],
                "weights": weights,
                "input_activations": None if activations == "none" else inputs,
                "output_activations": None,
            }
        },
    }


def modelopt_config(strategy: str, activations: str, ignore: Sequence[str]) -> dict[str, object]:
    """Return hf_quant_config.json as ModelOpt writes it."""
    names = {("tensor", "static"): "FP8", ("channel", "dynamic"): "FP8_PER_CHANNEL_PER_TOKEN"}
    return {
        "producer": {"name": "modelopt", "version": "0.29.0"},
        "quantization": {
            "quant_algo": names[strategy, activations],
            "kv_cache_quant_algo": "FP8",
            "exclude_modules": ["lm_head", *ignore],
        },
    }


def fp8_config(strategy: str, activations: str, ignore: Sequence[str]) -> dict[str, object]:
    """Return quantization_config of Hugging Face's fp8."""
    assert strategy in ("tensor", "block")
    return {
        "quant_method": "fp8",
        "activation_scheme": activations,
        "weight_block_size": [BLOCK, BLOCK] if strategy == "block" else None,
        "modules_to_not_convert": ["lm_head", *ignore],
    }

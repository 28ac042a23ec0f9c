"""Checkpoints of GPT-OSS in MXFP4: random values and scales in place of the experts' matrices, and
transformers' model of them, which it dequantizes while it loads."""

import json
import re
from collections.abc import Sequence
from pathlib import Path

import torch
import transformers
from safetensors.torch import load_file, save_file

EXPERTS = re.compile(r"model\.layers\.(\d+)\.mlp\.experts\.(gate_up_proj|down_proj)")
SCALES = (121, 124)
"""Bounds of the random scales: products have values of size 1."""


def to_mxfp4(
    path: Path, seed: int = 0, unquantized_layers: Sequence[int] = (), num_files: int = 1
) -> transformers.PreTrainedModel:
    """Rewrite a checkpoint in place, in one or several files, a matrix's scales in another than its
    values. Return its model in float32. unquantized_layers keep their experts."""
    generator = torch.Generator().manual_seed(seed)
    tensors = load_file(path / "model.safetensors")
    for name in [name for name in tensors if EXPERTS.fullmatch(name)]:
        if int(EXPERTS.fullmatch(name)[1]) in unquantized_layers:
            continue
        num_experts, columns, rows = tensors.pop(name).shape
        blocks = (num_experts, rows, columns // 32)
        tensors[f"{name}_blocks"] = torch.randint(
            256, (*blocks, 16), dtype=torch.uint8, generator=generator
        )
        tensors[f"{name}_scales"] = torch.randint(
            *SCALES, blocks, dtype=torch.uint8, generator=generator
        )
    ignored = ["model.layers.*.self_attn", "model.layers.*.mlp.router", "lm_head"]
    ignored += [f"model.layers.{index}.mlp" for index in unquantized_layers]
    config = json.loads((path / "config.json").read_text())
    config["quantization_config"] = {"quant_method": "mxfp4", "modules_to_not_convert": ignored}
    (path / "config.json").write_text(json.dumps(config))
    if num_files == 1:
        save_file(tensors, path / "model.safetensors")
    else:
        _save_shards(path, tensors, num_files)
    return transformers.AutoModelForCausalLM.from_pretrained(
        path,
        quantization_config=transformers.Mxfp4Config(dequantize=True),
        dtype=torch.float32,
        attn_implementation="eager",
    ).eval()


def _save_shards(path: Path, tensors: dict[str, torch.Tensor], count: int) -> None:
    (path / "model.safetensors").unlink()
    names = sorted(tensors)
    places = {name: f"model-{index % count}.safetensors" for index, name in enumerate(names)}
    for file in set(places.values()):
        held = {name: tensors[name] for name in names if places[name] == file}
        save_file(held, path / file)
    index = {"metadata": {}, "weight_map": places}
    (path / "model.safetensors.index.json").write_text(json.dumps(index))

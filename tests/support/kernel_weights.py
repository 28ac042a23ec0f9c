"""The parameters of a model's tensor-parallel ranks, cut from a checkpoint by hand: the tensors
that a trainer would send under kernel names."""

import json
import re
from pathlib import Path

import torch
from safetensors.torch import load_file

ROW_MULTIPLE = 64


def kernel_tensors(path: Path, tp: int) -> dict[str, torch.Tensor]:
    """Return tensors by kernel name, with @tpN if ranks hold different parts."""
    tensors: dict[str, torch.Tensor] = {}
    for file in sorted(path.glob("*.safetensors")):
        tensors |= load_file(file)
    config = json.loads((path / "config.json").read_text())
    merged: dict[str, torch.Tensor] = {}
    for rank in range(tp):
        suffix = f"@tp{rank}" if tp > 1 else ""
        for name in tensors:
            kernel, order = _kernel_name(name)
            if order:
                continue
            parts = [tensors[part] for part in _parts(name)]
            merged[kernel + suffix] = _shard(kernel, parts, rank, tp, config)
    return merged


def _kernel_name(name: str) -> tuple[str, int]:
    for group, target in (("qkv", "qkv_proj"), ("gate up", "gate_up_proj"), ("q k", "qk_norm")):
        members = {"qkv": ["q_proj", "k_proj", "v_proj"], "gate up": ["gate_proj", "up_proj"]}.get(
            group, ["q_norm", "k_norm"]
        )
        for order, member in enumerate(members):
            if f".{member}." in name:
                return name.replace(member, target), order
    return name, 0


def _parts(name: str) -> list[str]:
    for members in (["q_proj", "k_proj", "v_proj"], ["gate_proj", "up_proj"], ["q_norm", "k_norm"]):
        if re.search(rf"\.{members[0]}\.", name):
            return [name.replace(members[0], member) for member in members]
    return [name]


def _shard(
    kernel: str, parts: list[torch.Tensor], rank: int, tp: int, config: dict[str, int]
) -> torch.Tensor:
    if "norm" in kernel:
        return torch.cat(parts)
    if "embed_tokens" in kernel or "lm_head" in kernel:
        (table,) = parts
        rows = -(-table.shape[0] // (ROW_MULTIPLE * tp)) * ROW_MULTIPLE * tp
        padded = torch.zeros(rows, table.shape[1], dtype=table.dtype)
        padded[: table.shape[0]] = table
        return padded.chunk(tp)[rank].clone()
    if "o_proj" in kernel or "down_proj" in kernel:
        (matrix,) = parts
        return matrix.chunk(tp, dim=1)[rank].contiguous()
    assert config["num_key_value_heads"] % tp == 0, "heads are split, not repeated"
    return torch.cat([part.chunk(tp)[rank] for part in parts])

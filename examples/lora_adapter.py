"""Writes a random LoRA adapter for a checkpoint, in PEFT's format: `python -m examples.lora_adapter
MODEL DIRECTORY`. It replaces a trained adapter; docs/lora.md uses it."""

import argparse
import json
from pathlib import Path

import torch

from worker_daemon.models.tensor_bytes import write_safetensors

TARGETS = ("q_proj", "v_proj")


def write_adapter(model: Path, directory: Path, *, rank: int, seed: int) -> None:
    """Write an adapter of the query and value projections of all layers."""
    config = json.loads((model / "config.json").read_text())
    hidden, heads = config["hidden_size"], config["num_attention_heads"]
    head_dim = config.get("head_dim") or hidden // heads
    outputs = {"q_proj": heads * head_dim, "v_proj": config["num_key_value_heads"] * head_dim}
    generator = torch.Generator().manual_seed(seed)
    tensors = {}
    for layer in range(config["num_hidden_layers"]):
        for name in TARGETS:
            prefix = f"base_model.model.model.layers.{layer}.self_attn.{name}"
            a = torch.randn(rank, hidden, generator=generator) / hidden**0.5
            tensors[f"{prefix}.lora_A.weight"] = a
            tensors[f"{prefix}.lora_B.weight"] = torch.randn(
                outputs[name], rank, generator=generator
            )
    fields = {
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM",
        "r": rank,
        "lora_alpha": 2 * rank,
        "bias": "none",
        "target_modules": list(TARGETS),
    }
    directory.mkdir(parents=True, exist_ok=True)
    (directory / "adapter_config.json").write_text(json.dumps(fields, indent=2) + "\n")
    with (directory / "adapter_model.safetensors").open("wb") as file:
        write_safetensors(file, tensors)


def main() -> None:
    """Write the adapter that the command line asks for."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("model", type=Path)
    parser.add_argument("directory", type=Path)
    parser.add_argument("--rank", type=int, default=4)
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    write_adapter(options.model, options.directory, rank=options.rank, seed=options.seed)


if __name__ == "__main__":
    main()

"""What tests add to checkpoints: a tokenizer as transformers reads it, and LoRA adapters that no
other library has written."""

import copy
import json
from collections.abc import Mapping
from pathlib import Path

import torch
from safetensors.torch import save_file

from tests.support.checkpoints import Checkpoint
from tests.support.structured import EOS_TOKEN_ID, make_tokenizer

RANK, ALPHA = 4, 8.0
ATTENTION = ("q_proj", "k_proj", "v_proj", "o_proj")
MLP = ("gate_proj", "up_proj", "down_proj")


def write_tokenizer(path: Path) -> None:
    """Write the tokenizer of tests/support/structured.py, and what transformers wants beside it."""
    from transformers import PreTrainedTokenizerFast

    make_tokenizer(path)
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_file=str(path / "tokenizer.json"), eos_token="<eos>", pad_token="<a>"
    )
    assert tokenizer.eos_token_id == EOS_TOKEN_ID
    tokenizer.save_pretrained(path)


def projections(model: torch.nn.Module, targets: tuple[str, ...]) -> dict[str, torch.nn.Linear]:
    """Return the matrices of a transformers model that an adapter changes, by name."""
    found = {name: module for name, module in model.named_modules() if name.endswith(targets)}
    assert found, targets
    return found


def write_adapter(
    path: Path,
    model: torch.nn.Module,
    seed: int,
    targets: tuple[str, ...] = (*ATTENTION, *MLP),
    rank: int = RANK,
) -> dict[str, torch.Tensor]:
    """Write an adapter of random matrices in PEFT's format; return what it adds to each weight."""
    generator = torch.Generator().manual_seed(seed)
    tensors, added = {}, {}
    for name, matrix in projections(model, targets).items():
        shrink = torch.randn(rank, matrix.in_features, generator=generator)
        shrink *= matrix.in_features**-0.5
        expand = torch.randn(matrix.out_features, rank, generator=generator) * 0.2
        tensors[f"base_model.model.{name}.lora_A.weight"] = shrink
        tensors[f"base_model.model.{name}.lora_B.weight"] = expand
        added[name] = ALPHA / rank * expand @ shrink
    path.mkdir()
    save_file(tensors, path / "adapter_model.safetensors")
    config = {
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM",
        "bias": "none",
        "r": rank,
        "lora_alpha": ALPHA,
        "target_modules": list(targets),
    }
    (path / "adapter_config.json").write_text(json.dumps(config))
    return added


def merged(reference: Checkpoint, added: Mapping[str, torch.Tensor]) -> Checkpoint:
    """Return the model with an adapter added to its weights."""
    model = copy.deepcopy(reference.model)
    with torch.no_grad():
        for name, values in added.items():
            model.get_submodule(name).weight += values
    return Checkpoint(reference.path, model)

"""Random LoRA adapters that PEFT makes and saves, and transformers' model with one merged into its
weights by PEFT."""

import copy
import json
import random
from collections.abc import Mapping, Sequence
from pathlib import Path

import torch
from peft import LoraConfig, get_peft_model
from safetensors.torch import save_file

from tests.support.checkpoints import Checkpoint, NearTie, prompts
from worker_client.group.loras import GroupAdapter
from worker_client.requests import GenerationRequest

ATTENTION = ("q_proj", "k_proj", "v_proj", "o_proj")
MLP = ("gate_proj", "up_proj", "down_proj")
ALL = (*ATTENTION, *MLP)
MAX_TOKENS = 10
"""Tokens of a request, unless a test says how many."""


def config_of(
    rank: int, alpha: float, targets: Sequence[str], **fields: object
) -> dict[str, object]:
    """Return PEFT's fields, including those that daemons read."""
    return {
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM",
        "bias": "none",
        "init_lora_weights": True,
        "r": rank,
        "lora_alpha": alpha,
        "lora_dropout": 0.05,
        "target_modules": list(targets),
        **fields,
    }


def write_adapter(
    directory: Path, config: Mapping[str, object], tensors: Mapping[str, torch.Tensor]
) -> None:
    """Write an adapter's two files."""
    directory.mkdir(exist_ok=True)
    (directory / "adapter_config.json").write_text(json.dumps(config))
    save_file(dict(tensors), directory / "adapter_model.safetensors")


def make_adapter(
    checkpoint: Checkpoint,
    name: str,
    *,
    seed: int,
    rank: int = 4,
    alpha: float = 8.0,
    targets: Sequence[str] = ALL,
    rank_pattern: Mapping[str, int] | None = None,
    alpha_pattern: Mapping[str, float] | None = None,
    use_rslora: bool = False,
    dtype: torch.dtype = torch.float32,
) -> Checkpoint:
    """Write an adapter `name` of random matrices beside the checkpoint; return the merged model.
    PEFT makes, saves and merges it."""
    generator = torch.Generator().manual_seed(seed)
    config = LoraConfig(
        task_type="CAUSAL_LM",
        r=rank,
        lora_alpha=alpha,
        lora_dropout=0.05,
        target_modules=list(targets),
        rank_pattern=dict(rank_pattern or {}),
        alpha_pattern=dict(alpha_pattern or {}),
        use_rslora=use_rslora,
    )
    adapted = get_peft_model(copy.deepcopy(checkpoint.model), config).eval()
    with torch.no_grad():
        for matrix, values in adapted.named_parameters():
            if ".lora_A." in matrix or ".lora_B." in matrix:
                deviation = 0.1 if ".lora_B." in matrix else values.shape[1] ** -0.5
                drawn = torch.randn(values.shape, generator=generator) * deviation
                values.copy_(drawn.to(dtype))
    path = checkpoint.path.parent / name
    saved = {matrix: values.to(dtype) for matrix, values in adapted.state_dict().items()}
    adapted.save_pretrained(path, state_dict=saved)
    return Checkpoint(path, adapted.merge_and_unload())


def clear_prompt(models: Sequence[Checkpoint], seed: int, length: int) -> list[int]:
    """Return a random prompt after which no model has a near tie: same_prompt of
    adapted_requests."""
    source = random.Random(seed)
    while True:
        prompt: list[int] = prompts(source.randrange(1 << 20), [length])[0].tolist()
        try:
            for model in models:
                model.greedy(prompt, MAX_TOKENS)
        except NearTie:
            continue
        return prompt


def adapted_requests(
    models: Sequence[tuple[Checkpoint, GroupAdapter | None]],
    seed: int,
    count: int,
    *,
    lengths: Sequence[int] = (5, 23, 11, 37),
    max_tokens: int = MAX_TOKENS,
    same_prompt: Sequence[int] | None = None,
) -> tuple[list[GenerationRequest], dict[str, list[int]]]:
    """Return requests of each model in turn, and their expected tokens. same_prompt: all share one
    prompt; otherwise each has its own, without near ties."""
    source = random.Random(seed)
    requests: list[GenerationRequest] = []
    expected: dict[str, list[int]] = {}
    for index in range(count):
        model, adapter = models[index % len(models)]
        name = f"r{seed}-{index}"
        while True:
            drawn = prompts(source.randrange(1 << 20), [lengths[index % len(lengths)]])[0].tolist()
            prompt = drawn if same_prompt is None else [*same_prompt]
            try:
                expected[name] = model.greedy(prompt, max_tokens)
            except NearTie:
                assert same_prompt is None, "choose another prompt"
                continue
            break
        requests.append(
            GenerationRequest(
                id=name,
                prompt=torch.tensor(prompt, dtype=torch.int32).numpy(),
                max_tokens=max_tokens,
                features=() if adapter is None else (adapter.extension,),
            )
        )
    return requests, expected

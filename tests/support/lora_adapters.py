"""Random LoRA adapters in PEFT's format, and transformers' model with one merged into its weights:
W + scale * B A in float32."""

import copy
import json
import math
import random
from collections.abc import Mapping, Sequence
from pathlib import Path

import torch
from safetensors.torch import save_file

from tests.support.checkpoints import Checkpoint, NearTie, prompts
from worker_client.group_adapters import GroupAdapter
from worker_client.requests import GenerationRequest

ATTENTION = ("q_proj", "k_proj", "v_proj", "o_proj")
MLP = ("gate_proj", "up_proj", "down_proj")
ALL = (*ATTENTION, *MLP)


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
    """Write an adapter `name` next to the checkpoint; return the merged model."""
    generator = torch.Generator().manual_seed(seed)
    merged = copy.deepcopy(checkpoint.model)
    tensors: dict[str, torch.Tensor] = {}
    for module, layer in merged.named_modules():
        own = module.rpartition(".")[2]
        if own not in targets:
            continue
        r, scaled = (rank_pattern or {}).get(own, rank), (alpha_pattern or {}).get(own, alpha)
        outputs, inputs = layer.weight.shape
        a = (torch.randn(r, inputs, generator=generator) / inputs**0.5).to(dtype)
        b = (0.1 * torch.randn(outputs, r, generator=generator)).to(dtype)
        prefix = f"base_model.model.{module}"
        tensors |= {f"{prefix}.lora_A.weight": a, f"{prefix}.lora_B.weight": b}
        scale = scaled / math.sqrt(r) if use_rslora else scaled / r
        with torch.no_grad():
            layer.weight += scale * (b.float() @ a.float())
    fields = {"use_rslora": use_rslora}
    if rank_pattern:
        fields["rank_pattern"] = dict(rank_pattern)
    if alpha_pattern:
        fields["alpha_pattern"] = dict(alpha_pattern)
    path = checkpoint.path.parent / name
    write_adapter(path, config_of(rank, alpha, targets, **fields), tensors)
    return Checkpoint(path, merged)


def adapted_requests(
    models: Sequence[tuple[Checkpoint, GroupAdapter | None]],
    seed: int,
    count: int,
    *,
    lengths: Sequence[int] = (5, 23, 11, 37),
    max_tokens: int = 10,
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
                prompt_token_ids=torch.tensor(prompt, dtype=torch.int32).numpy(),
                max_tokens=max_tokens,
                features=() if adapter is None else (adapter.extension,),
            )
        )
    return requests, expected

"""Checkpoints of the family of tests/support/families/decaying.py, and their reference:
transformers' Llama, with the sums of whole sequences in place of some attention. No sum is made
from an earlier one there: each is computed from all values before it."""

import json
from collections.abc import Sequence
from pathlib import Path

import torch
import transformers

from tests.support.checkpoints import DEFAULT, SIZES, Checkpoint

WIDTH = 40


class WholeSums(torch.nn.Module):
    """Takes the place of a layer's attention."""

    def __init__(self, hidden_size: int, width: int) -> None:
        super().__init__()
        self.value_proj = torch.nn.Linear(hidden_size, width, bias=False)
        self.gate_proj = torch.nn.Linear(hidden_size, width, bias=False)
        self.o_proj = torch.nn.Linear(width, hidden_size, bias=False)
        self.decay = torch.nn.Parameter(torch.zeros(width))

    def forward(self, hidden_states: torch.Tensor, **unused: object) -> tuple[torch.Tensor, None]:
        """hidden_states [batch, T, hidden size]."""
        values = self.value_proj(hidden_states)
        places = torch.arange(values.shape[1])
        distance = (places.unsqueeze(1) - places).clamp_min(0)
        weights = self.decay.sigmoid() ** distance.unsqueeze(2)
        weights = weights * (places.unsqueeze(1) >= places).unsqueeze(2)
        sums = torch.einsum("tsw,bsw->btw", weights, values)
        gate = torch.nn.functional.silu(self.gate_proj(hidden_states))
        return self.o_proj(sums * gate), None


def make_decaying(
    directory: Path,
    name: str,
    sum_layers: Sequence[int] = (1, 2),
    seed: int = 0,
    checkpoint_blocks: int | None = None,
    **sizes: object,
) -> Checkpoint:
    """Write a checkpoint, whose layers have sums where named. checkpoint_blocks: see
    StateLayerSpec."""
    rope = {"rope_theta": 10_000.0, **DEFAULT}
    config = transformers.LlamaConfig(**{**SIZES, **sizes}, rope_parameters=rope, use_cache=False)
    torch.manual_seed(seed)
    model = transformers.LlamaForCausalLM(config).float().eval()
    for index in sum_layers:
        model.model.layers[index].self_attn = WholeSums(config.hidden_size, WIDTH)
    with torch.no_grad():
        for parameter_name, tensor in model.named_parameters():
            if parameter_name.endswith(".decay"):  # what was long ago counts
                tensor.normal_(3.0, 0.5)
            elif tensor.dim() == 1:
                tensor.normal_(1.0 if "norm" in parameter_name else 0.0, 0.5)
            elif ".self_attn." in parameter_name:
                tensor.normal_(0.0, config.initializer_range)
    model.generation_config.use_cache = False
    path = directory / name
    model.save_pretrained(path)
    fields = json.loads((path / "config.json").read_text())
    fields |= {
        "architectures": ["DecayingSumForCausalLM"],
        "sum_layers": [*sum_layers],
        "sum_width": WIDTH,
        "sum_checkpoint_blocks": checkpoint_blocks,
    }
    (path / "config.json").write_text(json.dumps(fields))
    return Checkpoint(path, model)

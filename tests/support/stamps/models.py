"""Models of one shape that sample tokens of different classes: token t is one of model t modulo
NUM_MODELS."""

from pathlib import Path

import torch
from transformers.utils.logging import disable_progress_bar

from tests.support.checkpoints import Checkpoint, make_checkpoint
from tests.support.stamps.plan import NUM_MODELS

OFFSET = 4.0
"""First component of each embedding, and so of each hidden state: no layer adds to it."""
LEAD = 8.0
"""What the head adds to, or takes from, a token's logit for each unit of this component."""


def make_models(directory: Path, architecture: str, **options: object) -> list[Checkpoint]:
    """Make NUM_MODELS checkpoints: a model's head leads its own tokens by far."""
    disable_progress_bar()
    made = []
    for number in range(NUM_MODELS):
        options = {"num_hidden_layers": 2, "tie_word_embeddings": False, **options}
        checkpoint = make_checkpoint(directory, architecture, **{**options, "seed": 70 + number})
        _mark(checkpoint, number)
        made.append(checkpoint)
    return made


def _mark(checkpoint: Checkpoint, number: int) -> None:
    model = checkpoint.model
    with torch.no_grad():
        head = model.get_output_embeddings().weight
        own = torch.arange(head.shape[0]) % NUM_MODELS == number
        head[:, 0] = torch.where(own, LEAD, -LEAD)
        model.get_input_embeddings().weight[:, 0] = OFFSET
        model.base_model.norm.weight[0] = 1.0
        for name, parameter in model.named_parameters():
            if "o_proj" in name or "down_proj" in name:  # [..., hidden, width]
                parameter[..., 0, :] = 0.0
    model.save_pretrained(checkpoint.path)

"""Pooling as transformers and sentence-transformers compute it, for one prompt at a time."""

import json
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import torch
from torch.nn import functional

from rpc_schema.pooling import PoolingParams
from tests.support.checkpoints import Checkpoint
from worker_client.requests import GenerationRequest

MODES = ("lasttoken", "cls", "mean")


def pooling_request(
    req_id: str, prompt: Sequence[int], task: str, **params: object
) -> GenerationRequest:
    """Return a pooling request."""
    tokens = np.asarray(prompt, np.int32)
    return GenerationRequest(req_id, tokens, pooling=PoolingParams(task=task, **params))


def last_states(checkpoint: Checkpoint, prompt: Sequence[int]) -> torch.Tensor:
    """Return the last hidden states of the bare model, float32 [len(prompt), H]."""
    model = checkpoint.model
    with torch.no_grad():
        return model.base_model(torch.tensor([list(prompt)])).last_hidden_state[0]


def scores(checkpoint: Checkpoint, prompt: Sequence[int]) -> torch.Tensor:
    """Return a classifier's logits, float32 [labels] or [len(prompt), labels]."""
    with torch.no_grad():
        return checkpoint.model(torch.tensor([list(prompt)])).logits[0]


def embedding(states: torch.Tensor, dimensions: int = 0, normalize: bool = True) -> np.ndarray:
    """Return the expected embedding of states [..., H]."""
    kept = states[..., : dimensions or states.shape[-1]]
    return (functional.normalize(kept, dim=-1) if normalize else kept).numpy()


def write_modules(path: Path, mode: str, hidden_size: int, *, normalize: bool) -> None:
    """Turn a checkpoint into one of sentence-transformers, with files in the older form."""
    kinds = ["Transformer", "Pooling", *(["Normalize"] if normalize else [])]
    modules = [
        {
            "idx": index,
            "name": str(index),
            "path": f"{index}_{kind}" if index else "",
            "type": f"sentence_transformers.models.{kind}",
        }
        for index, kind in enumerate(kinds)
    ]
    names = {
        "cls": "cls_token",
        "mean": "mean_tokens",
        "lasttoken": "lasttoken",
        "max": "max_tokens",
    }
    flags = {f"pooling_mode_{name}": key == mode for key, name in names.items()}
    (path / "modules.json").write_text(json.dumps(modules))
    (path / "1_Pooling").mkdir()
    config = {"word_embedding_dimension": hidden_size, **flags}
    (path / "1_Pooling" / "config.json").write_text(json.dumps(config))
    if normalize:
        (path / "2_Normalize").mkdir()


def sentence_vectors(path: Path, prompts: Sequence[Sequence[int]]) -> list[np.ndarray]:
    """Return sentence-transformers' vectors for token ids, with a checkpoint's modules."""
    from sentence_transformers import SentenceTransformer  # slow to import, and used by few tests

    model = SentenceTransformer(str(path), device="cpu", local_files_only=True)
    vectors = []
    for prompt in prompts:
        ids = torch.tensor([list(prompt)])
        features = {"input_ids": ids, "attention_mask": torch.ones_like(ids)}
        with torch.no_grad():
            vectors.append(model(features)["sentence_embedding"][0].numpy())
    return vectors

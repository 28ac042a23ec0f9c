"""Pooling as transformers and sentence-transformers compute it, for one prompt at a time."""

import json
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

import numpy as np
import torch
import transformers
from tokenizers import Tokenizer, models, pre_tokenizers, processors
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


def write_tokenizer(path: Path, family: str) -> None:
    """Give a checkpoint of Bert or XLMRoberta a tokenizer of words w5, w6, ..., whose ids are their
    numbers."""
    special = {"<pad>": 0, "<s>": 1, "</s>": 2, "<unk>": 3, "<mask>": 4}
    words = special | {f"w{number}": number for number in range(5, 300)}
    tokenizer = Tokenizer(models.WordLevel(words, unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    tokenizer.post_processor = processors.TemplateProcessing(
        single="<s> $A </s>",
        pair="<s> $A </s> $B:1 </s>:1",
        special_tokens=[("<s>", 1), ("</s>", 2)],
    )
    names = ["input_ids", "attention_mask"]
    transformers.PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        model_input_names=[*names, "token_type_ids"] if family == "Bert" else names,
        cls_token="<s>",
        sep_token="</s>",
        pad_token="<pad>",
        unk_token="<unk>",
    ).save_pretrained(path)


def save_cross_encoder(path: Path, activation: str) -> None:
    """Save a checkpoint's files as sentence-transformers does, with a class of torch.nn."""
    from sentence_transformers import CrossEncoder  # as in sentence_vectors

    activation_fn = getattr(torch.nn, activation)()
    model = CrossEncoder(str(path), device="cpu", activation_fn=activation_fn)
    model.save_pretrained(str(path))


class PairScores(NamedTuple):
    """Pairs of texts as CrossEncoder of sentence-transformers takes and scores them."""

    token_ids: list[list[int]]
    second_starts: list[int]
    """Index of each pair's first token of type 1; 0 if there is none."""
    scores: np.ndarray
    """float32 [pairs, labels], with the activation that the checkpoint's files name."""


def pair_scores(path: Path, pairs: Sequence[tuple[str, str]]) -> PairScores:
    """Return the scores of pairs."""
    from sentence_transformers import CrossEncoder  # as in sentence_vectors

    model = CrossEncoder(str(path), device="cpu", local_files_only=True)
    features = [model.preprocess([pair]) for pair in pairs]
    types = [each.get("token_type_ids", torch.zeros(1, 1))[0].tolist() for each in features]
    scores = model.predict(list(pairs), batch_size=1, show_progress_bar=False)
    return PairScores(
        [each["input_ids"][0].tolist() for each in features],
        [each.index(1) if 1 in each else 0 for each in types],
        np.asarray(scores, np.float32).reshape(len(pairs), -1),
    )


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

"""Random prompts with embeddings in place of some token ids, and transformers' tokens for them."""

import random
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from numpy.typing import NDArray
from safetensors.torch import save_file

from tests.support.checkpoints import (
    INITIALIZER_RANGE,
    LEAST_DISTINCT,
    VOCAB_SIZE,
    Checkpoint,
    NearTie,
)
from tests.support.flat_requests import flat_request
from worker_client.inputs.host_tensor import HostTensor
from worker_client.inputs.prompt_embeds import with_placeholders
from worker_client.requests import GenerationRequest


@dataclass(frozen=True)
class EmbeddedPrompt:
    """Token ids, and rows of embeddings at some positions."""

    token_ids: list[int]
    rows: torch.Tensor
    """[rows, hidden size], in the dtype of the upload."""
    at: tuple[tuple[int, int], ...]

    @property
    def ids(self) -> NDArray[np.int32]:
        """Return token ids for all positions, with placeholders."""
        return with_placeholders(self.token_ids, self.rows.shape[0], self.at)

    @property
    def embeds(self) -> NDArray[np.float32] | HostTensor:
        """Return the embeddings in a request's form."""
        if self.rows.dtype is torch.bfloat16:
            data = self.rows.view(torch.uint8).numpy().tobytes()
            return HostTensor.from_bytes("bfloat16", self.rows.shape, data)
        return self.rows.numpy()

    def whole(self, checkpoint: Checkpoint) -> torch.Tensor:
        """Return [tokens, hidden size], float32: the rows at their positions among the token
        embeddings."""
        ids = torch.from_numpy(self.ids).long()
        with torch.no_grad():
            whole = checkpoint.model.get_input_embeddings()(ids).clone()
        first = 0
        for start, length in self.at or ((0, self.rows.shape[0]),):
            whole[start : start + length] = self.rows[first : first + length].float()
            first += length
        return whole

    def request(self, req_id: str, max_tokens: int, **fields: object) -> GenerationRequest:
        """Return its request."""
        return flat_request(
            id=req_id,
            prompt=self.ids,
            max_tokens=max_tokens,
            prompt_embeds=self.embeds,
            prompt_embeds_at=self.at,
            **fields,
        )


def save(prompt: EmbeddedPrompt, directory: Path, name: str) -> dict[str, object]:
    """Save its rows, and return the fields of an input line that names them."""
    if prompt.rows.dtype is torch.bfloat16:
        file = f"{name}.safetensors"
        save_file({"rows": prompt.rows}, directory / file)
    else:
        file = f"{name}.npy"
        np.save(directory / file, prompt.rows.numpy())
    fields: dict[str, object] = {"id": name, "prompt_embeds": file}
    if prompt.token_ids:
        fields["prompt_token_ids"] = prompt.token_ids
    if prompt.at:
        fields["prompt_embeds_at"] = prompt.at
    return fields


def random_rows(
    rng: np.random.Generator, count: int, width: int, dtype: torch.dtype = torch.float32
) -> torch.Tensor:
    """Return random rows with the scale of a checkpoint's token embeddings."""
    values = rng.standard_normal((count, width), np.float32) * INITIALIZER_RANGE
    return torch.from_numpy(values).to(dtype)


def random_prompts(
    checkpoint: Checkpoint, seed: int, longest: int = 40
) -> Iterator[EmbeddedPrompt]:
    """Yield prompts in turn: only embeddings, embeddings first, in the middle, last, and in several
    places."""
    chance, rng = random.Random(seed), np.random.default_rng(seed)
    width = checkpoint.model.config.hidden_size
    for index in range(1000):
        num_tokens, num_rows = chance.randint(2, longest), chance.randint(2, longest)
        start = chance.randint(1, num_tokens)
        at: tuple[tuple[int, int], ...] = ()
        match index % 5:
            case 0:
                num_tokens = 0
            case 2:
                at = ((start, num_rows),)
            case 3:
                at = ((num_tokens, num_rows),)
            case 4:
                cut = num_rows // 2
                at = ((start // 2, cut), (start // 2 + cut + start % 2, num_rows - cut))
        dtype = chance.choice([torch.float32, torch.float16, torch.bfloat16])
        tokens = rng.integers(0, VOCAB_SIZE, num_tokens).tolist()
        yield EmbeddedPrompt(tokens, random_rows(rng, num_rows, width, dtype), at)


def clear_tokens(
    checkpoint: Checkpoint, prompt: EmbeddedPrompt, max_tokens: int
) -> list[int] | None:
    """Return the tokens of transformers' generate, or None if they repeat or are near ties."""
    try:
        tokens = checkpoint.embedded(prompt.whole(checkpoint), max_tokens)
    except NearTie:
        return None
    return tokens if len(set(tokens)) >= LEAST_DISTINCT else None


@dataclass(frozen=True)
class EmbeddedCases:
    """Prompts by request id, and the tokens of transformers' generate."""

    prompts: dict[str, EmbeddedPrompt]
    expected: dict[str, list[int]]
    max_tokens: int

    @property
    def requests(self) -> list[GenerationRequest]:
        """Return the requests of all prompts."""
        return [prompt.request(name, self.max_tokens) for name, prompt in self.prompts.items()]


def clear_cases(
    checkpoint: Checkpoint, seed: int, count: int, max_tokens: int, longest: int = 40
) -> EmbeddedCases:
    """Return prompts with varied outputs and without near ties, one of each kind in turn."""
    cases = EmbeddedCases({}, {}, max_tokens)
    for index, prompt in enumerate(random_prompts(checkpoint, seed, longest)):
        if index % 5 != len(cases.prompts) % 5:
            continue
        tokens = clear_tokens(checkpoint, prompt, max_tokens)
        if tokens is None:
            continue
        name = f"e{len(cases.prompts)}"
        cases.expected[name] = tokens
        cases.prompts[name] = prompt
        if len(cases.prompts) == count:
            return cases
    raise AssertionError("too few prompts have a clear continuation: choose another seed")

"""Requests whose logits are no numbers fail alone, beside others in the same steps."""

import shutil
from dataclasses import replace

import pytest
import torch
from safetensors.torch import load_file, save_file

from tests.support.gpu_generation import generate, gpu_group, make_requests

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.timeout(300),
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]
POISON = 77
"""A token whose embedding is NaN."""


@pytest.mark.parametrize(
    "fields", [{}, {"temperature": 0.8, "top_k": 20}, {"logprobs": 2}], ids=str
)
def test_request_whose_logits_are_no_numbers_fails_alone(llama, tmp_path, fields):
    checkpoint = shutil.copytree(llama, tmp_path / "model")
    for path in checkpoint.glob("*.safetensors"):
        tensors = load_file(path)
        if "model.embed_tokens.weight" in tensors:
            tensors["model.embed_tokens.weight"][POISON] = torch.nan
        save_file(tensors, path, {"format": "pt"})
    good = make_requests(12, seed=1, max_tokens=24, **fields)
    bad = []
    for index, request in enumerate(make_requests(8, seed=2, max_tokens=24, **fields)):
        prompt = request.prompt.copy()
        prompt[index % len(prompt)] = POISON
        bad.append(replace(request, id=f"bad {index}", prompt=prompt))
    with gpu_group(checkpoint, 1, 1, "float32") as (_, group, loaded):
        alone = generate(group, loaded, good)
        both = generate(group, loaded, [*bad[:4], *good[:6], *bad[4:], *good[6:]])
    for request in good:
        assert both[request.id].token_ids == alone[request.id].token_ids
        assert both[request.id].finish_reason == alone[request.id].finish_reason
    for request in bad:
        assert (both[request.id].token_ids, both[request.id].finish_reason) == ([], "error")

"""Pooling on a GPU in bfloat16: of a decoder beside generation, with graphs, and of an encoder with
the attention of whole prompts."""

import numpy as np
import torch
from torch.nn import functional
from transformers import AutoModel, BertConfig, BertModel

from rpc_schema.pooling import PoolingParams
from tests.support.gpu_generation import (
    SCHEDULER,
    gpu_group,
    make_requests,
    reference_logprobs,
)
from worker_client.driver import Driver
from worker_client.requests import GenerationRequest
from worker_client.scheduler import Scheduler, SchedulerLimits

LENGTHS = (1, 5, 17, 64, 130, 300, 511, 700, 1400)
"""Of prompts: in graphs, eagerly, and in chunks of 512 tokens."""


def pooling_requests(lengths, seed=3):
    rng = np.random.default_rng(seed)
    prompts = [rng.integers(3, 8192, length).astype(np.int32) for length in lengths]
    return [
        GenerationRequest(f"{task}{i}", prompt, pooling=PoolingParams(task=task, dimensions=64))
        for i, prompt in enumerate(prompts)
        for task in ("embed", "token_embed")
    ]


def serve(checkpoint, requests):
    """Outputs by id."""
    with gpu_group(checkpoint, 1, 1, "bfloat16") as (_, group, model):
        limits = SchedulerLimits(
            max_num_seqs=SCHEDULER.max_num_seqs,
            max_num_batched_tokens=SCHEDULER.max_num_batched_tokens,
            max_model_len=model.max_model_len,
            num_blocks=model.num_blocks,
            block_size=model.block_size,
            groups=model.groups,
            generates=model.metadata.generates,
            pooling=model.metadata.pooling,
        )
        driver = Driver(group, Scheduler(limits))
        for request in requests:
            driver.add_request(request)
        return {output.req_id: output for output in driver.run()}


@torch.inference_mode()
def reference_states(checkpoint, requests, dtype):
    """transformers' last hidden states, by id."""
    model = AutoModel.from_pretrained(checkpoint, dtype=dtype).to("cuda:0").eval()
    return {
        request.id: model(torch.from_numpy(request.prompt).long().unsqueeze(0).to("cuda:0"))
        .last_hidden_state[0]
        .float()
        .cpu()
        for request in requests
    }


def check(checkpoint, outputs, requests, pooled):
    """Pooled outputs are as near those of transformers in float32 as transformers' own in
    bfloat16."""
    exact = reference_states(checkpoint, requests, torch.float32)
    rounded = reference_states(checkpoint, requests, torch.bfloat16)
    ours, theirs = [], []
    for request in requests:
        whole = request.pooling.task == "token_embed"
        expected, other = (
            functional.normalize((own if whole else pooled(own).unsqueeze(0))[:, :64], dim=-1)
            for own in (exact[request.id], rounded[request.id])
        )
        found = torch.tensor(np.atleast_2d(outputs[request.id].pooled))
        assert found.shape == expected.shape
        ours.append(1 - (found * expected).sum(-1))
        theirs.append(1 - (other * expected).sum(-1))
    errors, usual = torch.cat(ours), torch.cat(theirs)
    print(
        f"mean {errors.mean():.2e} ({usual.mean():.2e}), max {errors.max():.2e} ({usual.max():.2e})"
    )
    assert errors.mean() < 1.5 * usual.mean()
    assert errors.max() < 3 * usual.max()


def check_greedy(checkpoint, outputs, requests):
    """Each token is the most likely one in float32, but for ties that are nearer than rounding to
    bfloat16 may move two logits."""
    exact = reference_logprobs(checkpoint, torch.float32, requests, outputs)
    rounded = reference_logprobs(checkpoint, torch.bfloat16, requests, outputs)
    usual = max((exact[r.id] - rounded[r.id]).abs().max().item() for r in requests)
    best = []
    for request in requests:
        logprobs, token_ids = exact[request.id], torch.tensor(outputs[request.id].token_ids)
        taken = logprobs.gather(1, token_ids.unsqueeze(1)).squeeze(1)
        assert (logprobs.max(dim=1).values - taken).max().item() <= 2 * usual, request.id
        best.append(logprobs.argmax(dim=1) == token_ids)
    assert torch.cat(best).float().mean().item() > 0.8


def test_decoder_pools_beside_generation(llama):
    pooling, generating = pooling_requests(LENGTHS), make_requests(16)
    mixed = [request for pair in zip(generating, pooling, strict=False) for request in pair]
    outputs = serve(llama, [*mixed, *pooling[len(generating) :]])
    check(llama, outputs, pooling, lambda states: states[-1])
    check_greedy(llama, outputs, generating)


def test_encoder_sees_whole_prompts(tmp_path):
    torch.manual_seed(1)
    config = BertConfig(
        vocab_size=8192,
        hidden_size=768,
        num_hidden_layers=6,
        num_attention_heads=12,
        intermediate_size=3072,
        initializer_range=0.04,
    )
    checkpoint = tmp_path / "models" / "bert"
    BertModel(config).save_pretrained(checkpoint)
    pooling = pooling_requests([length for length in LENGTHS if length <= 512])
    outputs = serve(checkpoint, pooling)
    check(checkpoint, outputs, pooling, lambda states: states.mean(0))

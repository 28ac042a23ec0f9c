"""Generation on GPUs through real daemons, and transformers' log probabilities of the same
tokens."""

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path

import numpy as np
import torch
from transformers import (
    AutoModelForCausalLM,
    LlamaConfig,
    LlamaForCausalLM,
    Qwen3MoeConfig,
    Qwen3MoeForCausalLM,
)

from rpc_schema.config import (
    CacheConfig,
    GraphConfig,
    ModelConfig,
    ParallelConfig,
    SchedulerConfig,
    WorkerConfig,
)
from tests.support.flat_requests import flat_request
from tests.support.serving import SHARED_GPU
from worker_client.driver import Driver
from worker_client.driver_parts.registry import DriverOptions
from worker_client.group.loading import LoadedGroup
from worker_client.launcher import LocalDaemons
from worker_client.requests import GenerationRequest
from worker_client.scheduler import RequestOutput, Scheduler, SchedulerLimits
from worker_client.structured.masked_steps import CompiledGrammars
from worker_client.worker_group import WorkerGroup

SHARED_CACHE = CacheConfig(block_size=16, gpu_memory_utilization=0.15)
"""Cache of stages in tests' own processes, which share the GPU; num_blocks decides its size."""
SCHEDULER = SchedulerConfig(max_num_seqs=64, max_num_batched_tokens=512, step_deadline_ms=20_000)


def make_checkpoint(directory: Path, seed: int = 0) -> Path:
    """Make a random Llama large enough for real kernel shapes, saved in float32."""
    torch.manual_seed(seed)
    config = LlamaConfig(
        vocab_size=8192,
        hidden_size=1024,
        intermediate_size=2816,
        num_hidden_layers=8,
        num_attention_heads=16,
        num_key_value_heads=4,
        max_position_embeddings=2048,
        initializer_range=0.04,
        tie_word_embeddings=False,
    )
    LlamaForCausalLM(config).save_pretrained(directory)
    return directory


def make_checkpoint_of_experts(directory: Path, seed: int = 0) -> Path:
    """Make a random Qwen3-MoE with the hidden size and heads of make_checkpoint's model."""
    torch.manual_seed(seed)
    config = Qwen3MoeConfig(
        vocab_size=8192,
        hidden_size=1024,
        moe_intermediate_size=384,
        num_hidden_layers=4,
        num_attention_heads=16,
        num_key_value_heads=4,
        head_dim=64,
        num_experts=32,
        num_experts_per_tok=4,
        norm_topk_prob=True,
        max_position_embeddings=2048,
        initializer_range=0.04,
        tie_word_embeddings=False,
    )
    Qwen3MoeForCausalLM(config).save_pretrained(directory)
    return directory


def make_requests(count: int, seed: int = 0, **fields: object) -> list[GenerationRequest]:
    """Return requests of 5 to 200 random tokens in and 64 out."""
    rng = np.random.default_rng(seed)
    return [
        flat_request(
            id=str(index),
            prompt=rng.integers(3, 8192, rng.integers(5, 200)).astype(np.int32),
            ignore_eos=True,
            seed=index,
            **{"max_tokens": 64, **fields},
        )
        for index in range(count)
    ]


@contextmanager
def gpu_group(
    checkpoint: Path, pp: int, tp: int, dtype: str, **model_options: bool | str
) -> Iterator[tuple[LocalDaemons, WorkerGroup, LoadedGroup]]:
    """Start and load pp x tp daemons, one per GPU."""
    parallel = ParallelConfig(pipeline_parallel_size=pp, tensor_parallel_size=tp)
    devices = [f"cuda:{index}" for index in range(pp * tp)]
    with (
        LocalDaemons(devices, checkpoint.parent) as daemons,
        WorkerGroup(daemons.endpoints, parallel) as group,
    ):
        try:
            group.attach()
            config = worker_config(checkpoint, parallel, dtype, **model_options)
            yield daemons, group, group.prepare(config)
        except BaseException:
            for rank in range(len(devices)):
                print(f"--- log of rank {rank}\n{daemons.log_tail(rank)}")
            raise


def worker_config(
    checkpoint: Path, parallel: ParallelConfig, dtype: str, **model_options: bool | str
) -> WorkerConfig:
    """Return the group's configuration."""
    return WorkerConfig(
        parallel=parallel,
        model=ModelConfig(model=str(checkpoint), dtype=dtype, **model_options),
        scheduler=SCHEDULER,
        # Other tests' processes also use device memory.
        cache=CacheConfig(gpu_memory_utilization=SHARED_GPU, kv_cache_memory_bytes=2 << 30),
        graph=GraphConfig(),
    )


def generate(
    group: WorkerGroup,
    model: LoadedGroup,
    requests: Sequence[GenerationRequest],
    grammars: CompiledGrammars | None = None,
) -> Mapping[str, RequestOutput]:
    """Serve the requests with the reference scheduler; return outputs by request id. Computes whole
    prompts: with the cached prefixes of an earlier run, the last bits of bf16 logits differ."""
    limits = SchedulerLimits(
        max_num_seqs=SCHEDULER.max_num_seqs,
        max_num_batched_tokens=SCHEDULER.max_num_batched_tokens,
        max_model_len=model.max_model_len,
        num_blocks=model.num_blocks,
        block_size=model.block_size,
        groups=model.groups,
        pipeline_parallel_size=group.parallel.pipeline_parallel_size,
        eos_token_ids=model.metadata.eos_token_ids,
    )
    driver = Driver(group, Scheduler(limits), options=DriverOptions(grammars, keeps_prefixes=False))
    for request in requests:
        driver.add_request(request)
    return {output.req_id: output for output in driver.run()}


@torch.inference_mode()
def reference_logprobs(
    checkpoint: Path,
    dtype: torch.dtype,
    requests: Sequence[GenerationRequest],
    outputs: Mapping[str, RequestOutput],
) -> dict[str, torch.Tensor]:
    """Return transformers' log probabilities of the generated positions: float32 [tokens,
    vocabulary] per request."""
    model = AutoModelForCausalLM.from_pretrained(checkpoint, dtype=dtype).to("cuda:0").eval()
    rows = {}
    for request in requests:
        generated = list(outputs[request.id].token_ids)
        tokens = [*request.prompt.tolist(), *generated]
        logits = model(torch.tensor([tokens], device="cuda:0")).logits[0].float()
        start = len(request.prompt) - 1
        rows[request.id] = torch.log_softmax(logits[start:-1], dim=-1).cpu()
    return rows

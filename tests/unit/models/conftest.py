"""Random tiny checkpoints made by transformers, and a driver that runs our stages over a paged
cache."""

import json
import threading
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
import pytest
import torch
import transformers

from tests.support.paged_run import MAX_LEN, PagedRun
from tests.support.waiting import PATIENCE_S
from worker_daemon.distributed.tp import SingleRank
from worker_daemon.layers.torch_attention import TorchPagedAttention
from worker_daemon.layers.torch_ops import TorchOps
from worker_daemon.models.config import read_model_config
from worker_daemon.models.decoder import build_stage, checkpoint_names
from worker_daemon.models.int4_order import load_orders
from worker_daemon.models.partition import check_partition, partition_layers
from worker_daemon.models.stored_head import with_stored_head
from worker_daemon.models.weights import load_weights

SIZES = {
    "vocab_size": 131,
    "hidden_size": 48,
    "intermediate_size": 80,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": MAX_LEN,
}


@dataclass
class Checkpoint:
    path: Path
    hf_model: transformers.PreTrainedModel


def write_transformers_4_form(config_path):
    """Rewrite config.json in the format of transformers before 5."""
    config = json.loads(config_path.read_text())
    rope = config.pop("rope_parameters")
    config["rope_theta"] = rope.pop("rope_theta")
    config["rope_scaling"] = None if rope["rope_type"] == "default" else rope
    config["torch_dtype"] = config.pop("dtype")
    config_path.write_text(json.dumps(config))


@pytest.fixture
def make_checkpoint(tmp_path):
    """(architecture, rope_parameters, form 4 or 5, seed, max_shard_size, stacked: experts in one
    tensor, config overrides) -> Checkpoint."""

    def make(
        architecture,
        rope=None,
        form=5,
        seed=0,
        max_shard_size="1GB",
        stacked=False,
        **overrides,
    ):
        model_class = getattr(transformers, architecture)
        rope = {"rope_theta": 1e4, **(rope or {})}
        if architecture == "Gemma3ForCausalLM":
            full = {"rope_type": "linear", "factor": 3.0, "rope_theta": 5e4}
            rope = {"full_attention": full, "sliding_attention": {"rope_type": "default", **rope}}
        config = model_class.config_class(
            **{**SIZES, "pad_token_id": 0, **overrides}, rope_parameters=rope
        )
        model = model_class(config).eval()
        generator = torch.Generator().manual_seed(seed)
        with torch.no_grad():
            for name, tensor in model.named_parameters():
                std = 0.1 if tensor.dim() == 1 else 0.2
                tensor.normal_(1.0 if "norm" in name else 0.0, std, generator=generator)
        path = tmp_path / f"{architecture}-{seed}{'-stacked' * stacked}"
        model.save_pretrained(path, max_shard_size=max_shard_size, save_original_format=not stacked)
        if form == 4:
            write_transformers_4_form(path / "config.json")
        return Checkpoint(path, model)

    return make


class ThreadGroup:
    """Tensor-parallel group whose ranks are threads of this process."""

    def __init__(self, size):
        self.size = size
        self.slots = [None] * size
        self.barrier = threading.Barrier(size, timeout=PATIENCE_S)

    def exchange(self, rank, x):
        self.slots[rank] = x
        self.barrier.wait()
        everyone = list(self.slots)
        self.barrier.wait()
        return everyone


class ThreadRank:
    def __init__(self, group, rank):
        self.group, self.rank, self.size = group, rank, group.size

    def all_reduce(self, x):
        return torch.stack(self.group.exchange(self.rank, x)).sum(0)

    def all_reduce_and_norm(self, source, sum_and_norm):
        return sum_and_norm(source._replace(part=self.all_reduce(source.part)))

    def all_gather_last_dim(self, x):
        return torch.cat(self.group.exchange(self.rank, x), dim=-1)


def load_stages(
    path, pp_size=1, tp=None, dtype=torch.float32, partition=None, expert_parallel=False
):
    """All stages of one tensor-parallel rank, loaded, each with its caches."""
    tp = tp or SingleRank()
    config = with_stored_head(read_model_config(path), path)
    config = replace(config, expert_parallel=expert_parallel)
    check_partition(config, pp_size, tp.size)
    stages = []
    for index, layers in enumerate(partition_layers(config.num_hidden_layers, pp_size, partition)):
        stage = build_stage(
            config,
            layers,
            index == 0,
            index == pp_size - 1,
            tp,
            dtype,
            torch.device("cpu"),
            MAX_LEN,
            TorchPagedAttention(),
            TorchOps(),
        )
        load_orders(stage.parameters(), path)
        load_weights(stage.parameters(), path, checkpoint_names(config), lambda progress: None)
        stages.append(stage)
    return stages


@pytest.fixture
def random_sequences():
    def make(lengths, seed=0, vocab_size=SIZES["vocab_size"]):
        rng = np.random.default_rng(seed)
        return [rng.integers(0, vocab_size, length) for length in lengths]

    return make


@pytest.fixture
def paged_run():
    return PagedRun


@pytest.fixture
def stages_of():
    return load_stages


@pytest.fixture
def on_tensor_parallel_ranks():
    """(size, f(tp)) -> the results of f on every rank, run on threads."""

    def run(size, function):
        group = ThreadGroup(size)
        with ThreadPoolExecutor(size) as pool:
            futures = [pool.submit(function, ThreadRank(group, rank)) for rank in range(size)]
            return [future.result(timeout=PATIENCE_S) for future in futures]

    return run


@pytest.fixture
def reference_logprobs():
    """float32 log-softmax of transformers for each sequence."""

    def run(hf_model, sequences):
        with torch.no_grad():
            return [
                hf_model(torch.from_numpy(s).unsqueeze(0)).logits[0].float().log_softmax(-1)
                for s in sequences
            ]

    return run

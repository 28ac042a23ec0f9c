"""New weights in a running group: over gloo and from disk, in the checkpoint's names and in the
ranks' own, equal to a fresh load; and what is left when an update cannot be or breaks off."""

import contextlib
import json
import os
import random
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from client.errors import (
    IllegalStateError,
    RemoteCheckpointError,
    RemoteConfigError,
    WeightsNotWhole,
    WeightTransferError,
)
from client.scheduler import Scheduler
from client.trainer.broadcast import TransferStopped
from client.trainer.sender import WeightSender
from client.worker_client import TensorList
from rpc_schema.weight_transfer import (
    BroadcastEngine,
    BroadcastSource,
    DiskEngine,
    DiskSource,
    IpcEngine,
)
from tests.support.checkpoints import decisive_prompts, make_checkpoint
from tests.support.kernel_weights import kernel_tensors
from tests.support.serving import assert_greedy, generate, greedy_request, scheduler_limits

ARCHITECTURE = "Qwen3ForCausalLM"
OPTIONS = {"tie_word_embeddings": False, "num_hidden_layers": 2}
TOKENS = 8
TRAINER = Path(__file__).parents[1] / "support" / "dying_trainer.py"


@pytest.fixture(scope="module")
def old(checkpoint):
    return checkpoint(ARCHITECTURE, seed=81, **OPTIONS)


@pytest.fixture(scope="module")
def new(checkpoint):
    return checkpoint(ARCHITECTURE, seed=82, **OPTIONS)


def requests_for(model, seed=5):
    prompts = decisive_prompts(model, seed, [9, 17], TOKENS)
    return [greedy_request(f"r{i}", prompt, TOKENS) for i, prompt in enumerate(prompts)]


@pytest.fixture(scope="module")
def new_requests(new):
    return requests_for(new)


def tensors_of(model):
    return dict(model.model.state_dict())


def checksums(group):
    return [reply.checksums for reply in group.compute_weight_checksums()]


def addresses(group):
    """Where each rank's weights lie is part of no reply: what tells is the size of what it maps."""
    return [status.memory_bytes["weights"] for status in group.get_status()]


def states(group):
    return [status.weights.state for status in group.get_status()]


def listed(tensors):
    names = {torch.float32: "float32", torch.bfloat16: "bfloat16"}
    return TensorList(
        tuple(tensors),
        tuple(names[tensor.dtype] for tensor in tensors.values()),
        tuple(tuple(tensor.shape) for tensor in tensors.values()),
    )


@pytest.mark.parametrize(
    ("pp", "tp", "format", "packed_bytes"),
    [
        (2, 1, "checkpoint", 0),
        (1, 2, "checkpoint", 50_000),
        (2, 1, "kernel", 50_000),
        (1, 2, "kernel", 0),
    ],
)
def test_update_over_gloo_equals_a_fresh_load(
    serve, old, new, new_requests, pp, tp, format, packed_bytes
):
    with serve(new.path, pp, tp) as (group, _):
        expected = checksums(group)
    with serve(old.path, pp, tp) as (group, loaded):
        before = checksums(group)
        assert all(a != b for a, b in zip(before, expected, strict=True))
        tensors = tensors_of(new)
        if format == "kernel":
            tensors = kernel_tensors(new.path, tp)
        generate(group, loaded, requests_for(old))
        with WeightSender(group, "gloo", timeout_s=20) as sender:
            report = sender.send(tensors, format=format, packed_bytes=packed_bytes)
            assert report.num_updates == 1
            assert checksums(group) == expected
            assert_greedy(generate(group, loaded, new_requests), new, new_requests)
            # The same communicator serves the next update, and other dtypes are converted.
            if format == "checkpoint":
                half = {name: tensor.double() for name, tensor in tensors_of(old).items()}
                assert sender.send(half, packed_bytes=packed_bytes).num_updates == 2
                assert checksums(group) == before
        assert states(group) == ["whole"] * (pp * tp)

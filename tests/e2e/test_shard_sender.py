"""Weight updates from trainers of several processes: the same tokens as transformers' model with
the new weights, each worker receives its own part alone, and what a lost trainer rank leaves."""

import contextlib
import random
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch.distributed as dist
from safetensors.torch import load_file

from rpc_schema.errors import ConfigError, TransferError
from rpc_schema.weight_transfer import BroadcastSource, ShardSource
from tests.e2e.test_weight_update import (
    ARCHITECTURE,
    OPTIONS,
    checksums,
    listed,
    requests_for,
    settled_states,
)
from tests.support.forked_processes import ForkedPopen
from tests.support.serving import assert_greedy, generate
from tests.support.shard_trainer import PACKED_BYTES, cut, join
from worker_client.trainer.communicator import Communicator
from worker_client.trainer.shards import ShardSender
from worker_client.wire.worker_client import TensorList

ROOT = Path(__file__).parents[2]
TIMEOUT_S = 20.0


@pytest.fixture(scope="module")
def old(checkpoint):
    return checkpoint(ARCHITECTURE, seed=81, **OPTIONS)


@pytest.fixture(scope="module")
def new(checkpoint):
    return checkpoint(ARCHITECTURE, seed=82, **OPTIONS)


@contextlib.contextmanager
def trainer(tmp_path, size, model, kind, *, sends=1, lifetimes=()):
    """The trainer's rank 0, in this process, and its tensors; the other ranks run beside it."""
    lifetimes, path = dict(lifetimes), tmp_path / "ranks"
    others = [
        ForkedPopen(
            [sys.executable, "-m", "tests.support.shard_trainer", *map(str, words)],
            cwd=ROOT,
            stdout=subprocess.PIPE,
            text=True,
        )
        for rank in range(1, size)
        for words in [(path, rank, size, model.path, kind, sends, lifetimes.get(rank, -1))]
    ]
    try:
        join(path, 0, size)
        yield cut(load_file(model.path / "model.safetensors"), 0, size, kind), others
    finally:
        dist.destroy_process_group()
        for process in others:
            process.kill()
            process.communicate()


def watch_updates(group):
    """The replies of updates, from now on."""
    replies, update = [], group.weights.update

    def watched(*arguments):
        replies.append(update(*arguments))
        return replies[-1]

    group.weights.update = watched
    return replies


@pytest.mark.parametrize(
    ("size", "kind", "pp", "tp"), [(2, "rows", 2, 1), (4, "rows", 2, 2), (2, "columns", 1, 2)]
)
def test_each_worker_receives_its_part_alone(serve, tmp_path, old, new, size, kind, pp, tp):
    requests = requests_for(new)
    with serve(new.path, pp, tp) as (group, _):
        expected = checksums(group)
    with serve(old.path, pp, tp) as (group, loaded):
        replies = watch_updates(group)
        with trainer(tmp_path, size, new, kind, sends=2) as (shards, others):
            with ShardSender("gloo", group, timeout_s=TIMEOUT_S) as sender:
                assert sender.send(shards, packed_bytes=PACKED_BYTES).version == 1
                assert checksums(group) == expected
                assert_greedy(generate(group, loaded, requests), new, requests)
                report = sender.send(shards, packed_bytes=PACKED_BYTES)
            said = [process.communicate(timeout=60)[0].split("\n")[:2] for process in others]
        assert said == [["version 1", "version 2"]] * (size - 1)
        assert not any(process.returncode for process in others)
        assert checksums(group) == expected
    tensors = load_file(new.path / "model.safetensors")
    sizes = {name: each.nbytes for name, each in tensors.items()}
    # Each rank of a stage has the vectors whole, and its share of everything else.
    vectors = sum(each.nbytes for each in tensors.values() if each.dim() == 1)
    received = [reply.size_bytes for reply in replies[0]]
    assert sum(received) == sum(sizes.values()) + (tp - 1) * vectors
    assert max(received) == report.size_bytes < 1.1 * sum(sizes.values()) / (pp * tp) + vectors


def test_a_lost_trainer_rank_leaves_dirty_weights(serve, tmp_path, old, new):
    requests = requests_for(old)
    with serve(old.path, 1, 2) as (group, loaded):
        lifetime = random.randrange(1, 5)
        print(f"lifetime {lifetime}")
        with trainer(tmp_path, 4, new, "rows", lifetimes={2: lifetime}) as (shards, others):
            with ShardSender("gloo", group, timeout_s=TIMEOUT_S) as sender:
                began = time.monotonic()
                with pytest.raises(TransferError):
                    sender.send(shards, packed_bytes=PACKED_BYTES)
                assert time.monotonic() - began < TIMEOUT_S
            said = [others[place].communicate(timeout=60)[0] for place in (0, 2)]
        assert all(words.startswith("stopped") for words in said), said
        assert set(settled_states(group)) == {"dirty"}
        group.weights.reload()
        assert_greedy(generate(group, loaded, requests), old, requests)


def test_refused_shards_change_nothing(serve, tmp_path, old, new, monkeypatch):
    """One rank's mistake is every rank's refusal, before the first byte."""
    sent, original = [], Communicator.send_shards
    monkeypatch.setattr(
        Communicator,
        "send_shards",
        lambda self, payload, sizes: sent.append(sizes) or original(self, payload, sizes),
    )
    with serve(old.path, 1, 2) as (group, _):
        before = checksums(group)
        with trainer(tmp_path, 2, new, "rows") as (shards, others):
            name = "model.layers.0.self_attn.q_proj.weight"
            (piece,) = shards[name]
            shards[name] = [piece._replace(origin=(1, 0))]
            with ShardSender("gloo", group, timeout_s=TIMEOUT_S) as sender:
                with pytest.raises(ConfigError, match="overlaps"):
                    sender.send(shards, packed_bytes=PACKED_BYTES)
                whole = listed(load_file(new.path / "model.safetensors"))
                count = len(whole.names)
                delta = TensorList((f"{name}.indices", f"{name}.values"), ("int32", "float32"))
                for tensors, source, words in (
                    (whole, ShardSource(sources=(0,), packed_bytes=1), "one for each tensor"),
                    (whole, ShardSource(sources=(2,) * count, packed_bytes=1), "no such rank"),
                    (whole, BroadcastSource(), "several ranks, which send shards"),
                    (
                        delta._replace(shapes=((1,), (1,))),
                        ShardSource(sources=(0, 1), packed_bytes=1),
                        "sparse deltas come from one rank",
                    ),
                ):
                    with pytest.raises(ConfigError, match=words):
                        group.weights.update(tensors, source)
            words = others[0].communicate(timeout=60)[0]
        assert words.startswith("stopped ranks [0, 1] refused the transfer; nothing was sent")
        assert others[0].returncode == 0
        assert not sent and checksums(group) == before
        group.weights.reload()

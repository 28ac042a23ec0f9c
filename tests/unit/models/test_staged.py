"""Reading through buffers: every cut of every region arrives, from any file, and errors are
named."""

import os
import threading

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

from rpc_schema.errors import CheckpointError
from worker_daemon.distributed.tp import SingleRank
from worker_daemon.layers.attention import NullAttention
from worker_daemon.layers.torch_ops import TorchOps
from worker_daemon.models.config import read_model_config
from worker_daemon.models.decoder import build_stage
from worker_daemon.models.staged import Extent, read_staged
from worker_daemon.models.weights import load_through_buffers
from worker_daemon.regular_file import TruncatedError

CPU = torch.device("cpu")


class Rank:
    def __init__(self, rank, size):
        self.rank, self.size = rank, size


@pytest.mark.parametrize("buffer_bytes", [1, 300, 4096, 1 << 20])
@pytest.mark.parametrize("num_readers", [1, 5])
def test_regions_of_two_files_arrive_whole(tmp_path, buffer_bytes, num_readers):
    rng = np.random.default_rng()
    files, expected = {}, []
    for name in ("b", "a"):
        matrix = rng.standard_normal((37, 24)).astype(np.float32)
        vector = rng.standard_normal(513).astype(np.float16)
        path = tmp_path / name
        path.write_bytes(b"head" + vector.tobytes() + matrix.tobytes())
        base = 4 + vector.nbytes
        columns = Extent(base + 3 * 96 + 5 * 4, 7 * 4, 96, torch.float32, torch.zeros(30, 7))
        rows = Extent(base + 2 * 96, 96, 96, torch.float32, torch.zeros(9, 24, dtype=torch.float64))
        whole = Extent(4, 2, 2, torch.float16, torch.zeros(513))
        files[path] = [columns, rows, whole]
        expected += [matrix[3:33, 5:12], matrix[2:11], vector]
    heard = []
    read_staged(files, CPU, heard.append, num_readers=num_readers, buffer_bytes=buffer_bytes)
    targets = [extent.target for extents in files.values() for extent in extents]
    for target, source in zip(targets, expected, strict=True):
        assert np.array_equal(target.numpy(), source)
    assert sum(heard) == sum(target.numel() * target.element_size() for target in targets)
    assert not [thread for thread in threading.enumerate() if thread.name.startswith("load")]


@pytest.mark.parametrize("stride", [8, 12])
def test_a_file_that_ends_early_is_named(tmp_path, stride):
    path = tmp_path / "short"
    path.write_bytes(bytes(1000))
    extent = Extent(0, 8, stride, torch.float32, torch.zeros(126, 2))
    with pytest.raises(TruncatedError) as caught:
        read_staged({path: [extent]}, CPU, lambda count: None)
    assert caught.value.path == path


@pytest.mark.parametrize("row_bytes", [1024, 4096, 8192, 16384])
def test_columns_of_wide_rows_are_read_to_the_end_of_the_file(tmp_path, row_bytes):
    """Of a quarter of a row or less, and of more; the last row ends with the file."""
    values = torch.arange(64 * 4096, dtype=torch.float32).view(64, 4096)
    path = tmp_path / "rows"
    path.write_bytes(values.numpy().tobytes())
    columns = slice(4096 - row_bytes // 4, 4096)
    target = torch.zeros(64, row_bytes // 4)
    extent = Extent(16384 - row_bytes, row_bytes, 16384, torch.float32, target)
    read_staged({path: [extent]}, CPU, lambda count: None)
    assert torch.equal(target, values[:, columns])


@pytest.mark.parametrize("row_bytes", [4096, 2048])
def test_a_file_that_shrinks_while_it_is_read_is_an_error_and_no_signal(tmp_path, row_bytes):
    """Whole rows, and the columns of a rank."""
    path = tmp_path / "shrinking"
    path.write_bytes(bytes(1 << 20))
    extents = [Extent(0, row_bytes, 4096, torch.float32, torch.zeros(256, row_bytes // 4))]
    with pytest.raises(TruncatedError):
        read_staged(
            {path: extents},
            CPU,
            lambda count: os.truncate(path, 0),
            num_readers=1,
            buffer_bytes=8192,
        )


@pytest.mark.parametrize("architecture", ["LlamaForCausalLM", "Qwen2ForCausalLM"])
@pytest.mark.parametrize(("rank", "size"), [(0, 1), (0, 2), (1, 2)])
def test_a_shard_equals_the_checkpoint_s_regions(make_checkpoint, architecture, rank, size):
    made = make_checkpoint(architecture, max_shard_size="40KB")
    stage = build(made.path, Rank(rank, size) if size > 1 else SingleRank())
    wanted = wanted_by_file(made.path, stage)
    load_through_buffers(wanted, CPU, lambda count: None)
    state = made.hf_model.state_dict()
    for items in wanted.values():
        for parameter, piece in items:
            source = state[piece.name][piece.source].to(parameter.data.dtype)
            assert torch.equal(parameter.data[piece.target], source)


def reshape(tensors):
    tensors["model.norm.weight"] = torch.ones(49)


def make_integer(tensors):
    tensors["model.norm.weight"] = torch.ones(48, dtype=torch.int8)


def drop(tensors):
    del tensors["model.norm.weight"]


@pytest.mark.parametrize(
    ("change", "message"),
    [(reshape, r"in shape \(49,\)"), (make_integer, "dtype I8"), (drop, "has no tensor")],
)
def test_a_file_that_does_not_fit_is_refused(make_checkpoint, change, message):
    made = make_checkpoint("LlamaForCausalLM")
    stage = build(made.path, SingleRank())
    wanted = wanted_by_file(made.path, stage)
    file = made.path / "model.safetensors"
    tensors = {name: tensor.clone() for name, tensor in load_file(file).items()}
    change(tensors)
    save_file(tensors, file)
    with pytest.raises(CheckpointError, match=message):
        load_through_buffers(wanted, CPU, lambda count: None)


def build(path, tp):
    config = read_model_config(path)
    layers = range(config.num_hidden_layers)
    return build_stage(
        config, layers, True, True, tp, torch.bfloat16, CPU, 16, NullAttention(), TorchOps()
    )


def wanted_by_file(path, stage):
    """{file: [(parameter, piece)]} by looking into every file."""
    wanted = {}
    for file in sorted(path.glob("*.safetensors")):
        names = load_file(file).keys()
        items = [
            (parameter, piece)
            for parameter in stage.parameters()
            for piece in parameter.pieces
            if piece.name in names
        ]
        if items:
            wanted[file] = items
    return wanted

"""Measures the speed of weight updates of a running daemon: `python -m
benchmarks.weight_update --model DIR [--ways ipc,nccl,reload] [--directory DIR] [--out FILE.json]`.

One daemon on the first GPU holds dummy weights of the shapes in the model's config.json, in
bfloat16 (16 GB for Llama-8B); this process is driver and trainer. `ipc`: tensors on the same GPU,
copied once; its floor is a copy between two buffers of that GPU. `nccl`: tensors on the second GPU,
broadcast; its floor is a peer copy between the two. `reload`: a checkpoint on disk, in the page
cache; its floor is the slower of page cache and page-locked copies. `gloo`: host memory over
loopback, no floor. A rate is bytes divided by the seconds of update_weights on the rank; `whole` is
the time from send() until the next step is legal.
"""

import argparse
import os
import shutil
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import torch
from torch import Tensor

from benchmarks.loading import Figure, make_stage, read_rate, report, synchronize, write_checkpoint
from benchmarks.local_group import local_group
from rpc_schema.config import (
    CacheConfig,
    LoadFormat,
    ModelConfig,
    ParallelConfig,
    WorkerConfig,
)
from worker_client.trainer.sender import PACKED_BYTES, SendBackend, WeightSender
from worker_client.worker_group import WorkerGroup
from worker_daemon.models.config import read_model_config
from worker_daemon.models.decoder import unpacked_tensors

ROUNDS = 3
COPY_BYTES = 4 << 30
COPIES = 10
TRAINER_DEVICES = {"ipc": "cuda:0", "nccl": "cuda:1", "gloo": "cpu"}


def measure(options: argparse.Namespace, scratch: Path) -> Iterator[Figure]:
    """Yield the figures, in the order in which they are measured."""
    for way in options.ways:
        if way == "reload":
            yield from measure_reload(options, scratch)
        else:
            yield from measure_sends(options, scratch, way)


def measure_sends(options: argparse.Namespace, scratch: Path, way: SendBackend) -> Iterator[Figure]:
    """Send a whole state dict ROUNDS times over one communicator, packed and tensor by tensor."""
    model = scratch / "config-only"
    model.mkdir(exist_ok=True)
    shutil.copy(options.model / "config.json", model)
    trainer = torch.device(TRAINER_DEVICES[way])
    ceiling = None
    if trainer.type == "cuda":
        ceiling = copy_rate(trainer, torch.device("cuda:0"))
        kind = "copy on one GPU" if way == "ipc" else "copy between two GPUs"
        yield Figure(kind, ceiling, "GB/s")
    tensors = make_tensors(model, trainer)
    with (
        daemon(options.device, model, "dummy") as group,
        WeightSender(group, way, device=trainer, timeout_s=120) as sender,
    ):
        began = time.monotonic()
        sender.connect()
        yield Figure(f"{way}: engine", time.monotonic() - began, "s")
        for packed_bytes in (PACKED_BYTES,) if way == "ipc" else (PACKED_BYTES, 0):
            how = "" if way == "ipc" else ", packed" if packed_bytes else ", one by one"
            for number in range(1, ROUNDS + 1):
                began = time.monotonic()
                report = sender.send(tensors, packed_bytes=packed_bytes)
                whole = time.monotonic() - began
                rate = report.size_bytes / report.seconds / 1e9
                yield Figure(f"{way}{how}, {number}", rate, "GB/s", ceiling)
                yield Figure(f"{way}{how}, {number}, whole", whole, "s")
    tensors.clear()
    if trainer.type == "cuda":
        torch.cuda.empty_cache()


def measure_reload(options: argparse.Namespace, scratch: Path) -> Iterator[Figure]:
    """Measure reload_weights of a loaded model."""
    directory = scratch / "checkpoint"
    directory.mkdir()
    stage = make_stage(options.model, torch.device("meta"))
    files = write_checkpoint(options.model, stage, directory, 4 * 10**9)
    cache = read_rate(files, direct=False) / 1e9
    yield Figure("page cache", cache, "GB/s")
    ways = [cache]
    if options.device != "cpu":
        from benchmarks.ceilings import host_rate  # needs Triton

        ways.append(host_rate(to_device=True) / 1e9)
        yield Figure("pinned host to device", ways[-1], "GB/s")
    with daemon(options.device, directory, "auto") as group:
        for number in range(1, ROUNDS + 1):
            (reply,) = group.weights.reload()
            rate = reply.size_bytes / reply.seconds / 1e9
            yield Figure(f"reload_weights, {number}", rate, "GB/s", min(ways))


@contextmanager
def daemon(device: str, model: Path, load_format: LoadFormat) -> Iterator[WorkerGroup]:
    """Start a daemon, load a model, and yield the driver's group."""
    config = WorkerConfig(
        parallel=ParallelConfig(),
        model=ModelConfig(model=str(model), dtype="bfloat16", load_format=load_format),
        cache=CacheConfig(gpu_memory_utilization=0.4),  # leave memory for the trainer
    )
    with local_group([device], model.parent) as (group, _):
        group.load_chain.init_device(config)
        group.load_chain.load_model(config)
        yield group


def make_tensors(model: Path, device: torch.device) -> dict[str, Tensor]:
    """Return every tensor of the checkpoint, with random values."""
    generator = torch.Generator(device).manual_seed(0)
    return {
        name: torch.empty(spec.shape, dtype=torch.bfloat16, device=device).normal_(
            0, 0.02, generator=generator
        )
        for name, spec in unpacked_tensors(read_model_config(model)).items()
    }


def copy_rate(source: torch.device, target: torch.device) -> float:
    """Return GB per second of large copies, counting bytes that arrive."""
    here = torch.ones(COPY_BYTES, dtype=torch.uint8, device=source)
    there = torch.empty(COPY_BYTES, dtype=torch.uint8, device=target)
    there.copy_(here)
    synchronize(source)
    synchronize(target)
    began = time.monotonic()
    for _ in range(COPIES):
        there.copy_(here)
    synchronize(source)
    synchronize(target)
    rate = COPIES * COPY_BYTES / (time.monotonic() - began) / 1e9
    del here, there
    torch.cuda.empty_cache()
    return rate


def possible_ways(device: str) -> list[str]:
    """Return the ways that this machine has devices for."""
    if device == "cpu":
        return ["gloo", "reload"]
    return ["ipc", *(["nccl"] if torch.cuda.device_count() > 1 else []), "reload"]


def main() -> None:
    """Measure, print, and with --out write a list of figures."""
    # NCCL's rendezvous: the daemons listen only on loopback.
    os.environ.setdefault("NCCL_SOCKET_IFNAME", "lo")
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", type=Path, required=True)
    parser.add_argument("--directory", type=Path, help="parent of the scratch directory")
    parser.add_argument("--device", default="cuda:0" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--ways", type=lambda text: text.split(","))
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    options.ways = options.ways or possible_ways(options.device)
    report(measure, options)


if __name__ == "__main__":
    main()

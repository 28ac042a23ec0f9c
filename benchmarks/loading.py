"""Measures how fast weights are loaded: `python -m benchmarks.loading --model DIR [--directory DIR]
[--shard-gb N] [--cold] [--out FILE.json]`.

Writes a sharded bfloat16 checkpoint of the shapes in the model's config.json (16 GB for Llama-8B)
to a scratch directory, then measures the disk (O_DIRECT), the page cache, page-locked copies, and
`load_weights` itself. Its floor is the slowest stage: page cache and copies (the files were just
written), and also the disk with --cold, which first drops these files from the page cache. Then it
times dummy weights. Runs in one process, without a daemon.
"""

import argparse
import json
import mmap
import os
import shutil
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path

import numpy as np
import torch

from worker_daemon.distributed.tp import SingleRank
from worker_daemon.layers.attention import NullAttention
from worker_daemon.layers.torch_ops import TorchOps
from worker_daemon.models.config import read_model_config
from worker_daemon.models.decoder import DecoderStage, build_stage, checkpoint_names
from worker_daemon.models.weights import load_dummy_weights, load_weights

THREADS = 8
BLOCK = 16 << 20
DISK_BYTES = 6 << 30


@dataclass(frozen=True)
class Figure:
    """One measurement; floor is None if it is itself a ceiling, or has none."""

    name: str
    value: float
    unit: str
    floor: float | None = None


def report(
    measure: Callable[[argparse.Namespace, Path], Iterator[Figure]], options: argparse.Namespace
) -> None:
    """Print each figure as it is measured, in a scratch directory; write all to options.out."""
    figures = []
    with tempfile.TemporaryDirectory(dir=options.directory) as directory:
        for figure in measure(options, Path(directory)):
            figures.append(figure)
            floor = "" if figure.floor is None else f"of {figure.floor:.2f}"
            print(f"{figure.name:<36} {figure.value:>8.2f} {figure.unit} {floor}", flush=True)
    if options.out is not None:
        options.out.write_text(json.dumps([asdict(figure) for figure in figures], indent=1) + "\n")


def measure(options: argparse.Namespace, directory: Path) -> Iterator[Figure]:
    """Yield the figures, in the order in which they are measured."""
    device = torch.device(options.device)
    stage = make_stage(options.model, device)
    start = time.monotonic()
    files = write_checkpoint(options.model, stage, directory, int(options.shard_gb * 1e9))
    size = sum(file.stat().st_size for file in files)
    yield Figure("checkpoint written", size / (time.monotonic() - start) / 1e9, "GB/s")
    disk = Figure("disk, O_DIRECT", read_rate(files, direct=True) / 1e9, "GB/s")
    yield disk
    cache = Figure("page cache", read_rate(files, direct=False) / 1e9, "GB/s")
    yield cache
    ways = [cache.value]
    if device.type == "cuda":
        from benchmarks.ceilings import host_rate  # needs Triton

        link = Figure("pinned host to device", host_rate(to_device=True) / 1e9, "GB/s")
        yield link
        ways.append(link.value)
    for index in range(2):
        yield Figure(f"load {index + 1}", load_rate(options.model, directory), "GB/s", min(ways))
    if options.cold:
        forget(files)
        rate = load_rate(options.model, directory)
        yield Figure("load, cold", rate, "GB/s", min(*ways, disk.value))
    start = time.monotonic()
    load_dummy_weights(stage.parameters(), 0, lambda progress: None)
    synchronize(device)
    yield Figure("dummy weights", time.monotonic() - start, "s", 1.0)


def make_stage(model: Path, device: torch.device) -> DecoderStage:
    """Return the whole model on one device, without weights."""
    config = read_model_config(model)
    layers = range(config.num_hidden_layers)
    dtype, attention = torch.bfloat16, NullAttention()
    return build_stage(
        config, layers, True, True, SingleRank(), dtype, device, 16, attention, TorchOps()
    )


def write_checkpoint(
    model: Path, stage: DecoderStage, directory: Path, shard_bytes: int
) -> list[Path]:
    """Write every tensor that the stage reads, of random bytes, and the index; return the
    shards."""
    shutil.copy(model / "config.json", directory)
    pieces = {p.name: p.full_shape for parameter in stage.parameters() for p in parameter.pieces}
    shards: list[dict[str, tuple[int, ...]]] = [{}]
    for name, shape in pieces.items():
        if shards[-1] and num_bytes(*shards[-1].values(), shape) > shard_bytes:
            shards.append({})
        shards[-1][name] = shape
    noise = memoryview(np.random.default_rng(0).integers(0, 63, BLOCK, np.uint8).tobytes())
    files: list[Path] = []
    index: dict[str, str] = {}
    for number, shard in enumerate(shards, 1):
        files.append(directory / f"model-{number:05}-of-{len(shards):05}.safetensors")
        write_shard(files[-1], shard, noise)
        index |= dict.fromkeys(shard, files[-1].name)
    (directory / "model.safetensors.index.json").write_text(json.dumps({"weight_map": index}))
    return files


def write_shard(path: Path, tensors: dict[str, tuple[int, ...]], noise: memoryview) -> None:
    header, end = {}, 0
    for name, shape in tensors.items():
        start, end = end, end + num_bytes(shape)
        header[name] = {"dtype": "BF16", "shape": shape, "data_offsets": (start, end)}
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    with path.open("wb") as file:
        file.write(len(text).to_bytes(8, "little") + text)
        while end:
            end -= file.write(noise[: min(end, len(noise))])
        file.flush()
        os.fsync(file.fileno())


def num_bytes(*shapes: tuple[int, ...]) -> int:
    return sum(2 * int(np.prod(shape)) for shape in shapes)


def read_rate(files: Sequence[Path], *, direct: bool) -> float:
    """Return bytes per second of THREADS readers, each with its own buffer."""
    blocks = [
        (file, offset)
        for file in files
        for offset in range(0, file.stat().st_size - BLOCK + 1, BLOCK)
    ][: DISK_BYTES // BLOCK]
    with ThreadPoolExecutor(THREADS) as pool:
        start = time.monotonic()
        total = sum(pool.map(partial(read_blocks, direct), split(blocks)))
        return total / (time.monotonic() - start)


def split(blocks: list[tuple[Path, int]]) -> list[list[tuple[Path, int]]]:
    return [blocks[index::THREADS] for index in range(THREADS)]


def read_blocks(direct: bool, blocks: Sequence[tuple[Path, int]]) -> int:
    """Read blocks into one aligned buffer; return the bytes read."""
    buffer, total, fds = mmap.mmap(-1, BLOCK), 0, {}
    for path, offset in blocks:
        if path not in fds:
            fds[path] = os.open(path, os.O_RDONLY | (os.O_DIRECT if direct else 0))
        total += os.preadv(fds[path], [buffer], offset)
    for fd in fds.values():
        os.close(fd)
    return total


def forget(files: Sequence[Path]) -> None:
    """Ask the kernel to drop these files from its page cache."""
    for file in files:
        fd = os.open(file, os.O_RDONLY)
        os.fsync(fd)
        os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_DONTNEED)
        os.close(fd)


def load_rate(model: Path, directory: Path) -> float:
    """Return GB per second of load_weights, from its call until all weights are on the device."""
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    stage = make_stage(model, device)
    names = checkpoint_names(read_model_config(model))
    synchronize(device)
    start = time.monotonic()
    report = load_weights(stage.parameters(), directory, names, lambda progress: None)
    synchronize(device)
    return report.bytes_loaded / (time.monotonic() - start) / 1e9


def synchronize(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def main() -> None:
    """Measure, print, and with --out write a list of figures."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", type=Path, required=True)
    parser.add_argument("--directory", type=Path, help="parent of the scratch directory")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--shard-gb", type=float, default=4.0)
    parser.add_argument("--cold", action="store_true", help="also load uncached files")
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    report(measure, options)


if __name__ == "__main__":
    main()

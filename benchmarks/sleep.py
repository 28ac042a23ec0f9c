"""Measures sleep and wake-up: `python -m benchmarks.sleep --model DIR [--level 1|2] [--device
cuda|cpu] [--num-blocks N] [--cycles N] [--chunks] [--out FILE.json]`.

One worker in this process with dummy weights of the shapes in the model's config.json and a KV
cache that fills the device. Times Sleep and WakeUp at both levels (medians, and the first of each),
prints the device memory by kind before, asleep and after, and checks that greedy tokens after level
1 are the same as before. A floor is the weights' bytes divided by the measured link rate.
`--chunks` first times mapping an arena by chunk size.
"""

import argparse
import json
import statistics
import time
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path

import numpy as np
import torch

from benchmarks.stage_driver import MAX_NUM_BATCHED_TOKENS, StageDriver, bitmap
from rpc_schema.config import Dtype
from rpc_schema.lifecycle import Sleep, SleepLevel, WakeUp
from rpc_schema.step import ExecuteModel
from worker_daemon.device.arena import open_arena

MAX_MODEL_LEN = 8192
NUM_REQUESTS = 4
PROMPT_LEN = 100
NUM_TOKENS = 24
KINDS = ("weights", "buffers", "kv_cache", "torch_reserved")
"""Kinds of device memory; the rest is the context, libraries and other processes."""
ARENA_BYTES = 16 << 30
CHUNKS_MIB = (2, 32, 128, 512, 1024, 4096)
PAUSE_S = 1.0
"""Pause between sleep and wake-up."""
BACKUP_TIMEOUT_S = 300.0


@dataclass(frozen=True)
class Figure:
    """One measurement; floor is None if unknown."""

    name: str
    value: float
    unit: str
    floor: float | None = None


@dataclass(frozen=True)
class Links:
    """Bytes per second between device and page-locked memory; None without a device."""

    to_host: float | None = None
    to_device: float | None = None

    @classmethod
    def measure(cls, device: str) -> "Links":
        """Measure both directions by copying."""
        if device == "cpu":
            return cls()
        from benchmarks.ceilings import host_rate  # needs Triton

        rates = host_rate(to_device=False), host_rate(to_device=True)
        torch.cuda.empty_cache()  # otherwise part of the worker's memory would reuse these buffers
        return cls(*rates)


def measure(options: argparse.Namespace) -> Iterator[Figure]:
    """Yield the figures, in the order in which they are measured."""
    links = Links.measure(options.device)
    if links.to_host and links.to_device:
        yield Figure("device to pinned host", links.to_host / 1e9, "GB/s")
        yield Figure("pinned host to device", links.to_device / 1e9, "GB/s")
    device = "cpu" if options.device == "cpu" else "cuda:0"
    dtype: Dtype = "float32" if options.device == "cpu" else "bfloat16"
    driver = StageDriver(
        options.model,
        device,
        MAX_MODEL_LEN,
        dtype,
        num_blocks=options.num_blocks,
        enable_sleep_mode=True,
    )
    driver.start()
    before = held(driver)
    yield from memory_figures("before", before)
    yield Figure("host memory ready after warm-up", wait_for_backup(driver), "s")
    tokens = np.random.default_rng().integers(3, 1000, NUM_REQUESTS * PROMPT_LEN)
    expected = generate(driver, tokens)
    for level in options.levels:
        yield from cycle(driver, level, options.cycles, before["weights"], links)
        yield from memory_figures(f"after {level}", held(driver))
        if level == 1 and generate(driver, tokens) != expected:
            raise RuntimeError("greedy tokens after level 1 differ from those before")
        if level == 1:
            print(f"{NUM_REQUESTS} x {NUM_TOKENS} greedy tokens equal those before level 1")
    driver.worker.close()


def cycle(
    driver: StageDriver, level: SleepLevel, cycles: int, weights_bytes: int, links: Links
) -> Iterator[Figure]:
    """Sleep and wake up this many times, and then once without a pause in between: the driver
    clears freed memory for a while, which slows a wake-up."""
    asleep_s, awake_s = [], []
    asleep: Mapping[str, int] = {}
    for index in range(cycles):
        asleep_s.append(timed(driver, Sleep(**driver.ids(), level=level)))
        if not index:
            asleep = held(driver)
        time.sleep(PAUSE_S)
        awake_s.append(timed(driver, WakeUp(**driver.ids())))
    driver.worker.sleep(Sleep(**driver.ids(), level=level))
    at_once_s = timed(driver, WakeUp(**driver.ids()))
    sleep_floor = wake_floor = None
    if level == 1 and links.to_host and links.to_device:
        sleep_floor, wake_floor = weights_bytes / links.to_host, weights_bytes / links.to_device
    yield from memory_figures(f"asleep {level}", asleep)
    yield Figure(f"sleep {level}", statistics.median(asleep_s), "s", sleep_floor)
    yield Figure(f"sleep {level}, the first", asleep_s[0], "s", sleep_floor)
    yield Figure(f"wake {level}", statistics.median(awake_s), "s", wake_floor)
    yield Figure(f"wake {level}, the first", awake_s[0], "s", wake_floor)
    yield Figure(f"wake {level}, at once after sleep", at_once_s, "s", wake_floor)


def timed(driver: StageDriver, message: Sleep | WakeUp) -> float:
    """Return the worker's seconds, including the device's work."""
    driver.synchronize()
    start = time.perf_counter()
    if isinstance(message, Sleep):
        driver.worker.sleep(message)
    else:
        driver.worker.wake_up(message)
    driver.synchronize()
    return time.perf_counter() - start


def held(driver: StageDriver) -> Mapping[str, int]:
    """Return bytes by kind, as in the status, and the total memory in use on the device."""
    memory = driver.worker.describe().memory_bytes
    return {**memory, "used": memory["total"] - memory["free"]}


def memory_figures(when: str, memory: Mapping[str, int]) -> Iterator[Figure]:
    """Print device memory by kind; yield the total."""
    parts = {kind: memory[kind] for kind in KINDS if kind in memory}
    parts["context, libraries, others"] = memory["used"] - sum(parts.values())
    shown = ", ".join(f"{kind} {size / (1 << 30):.3f}" for kind, size in parts.items())
    print(f"{when:<10} GiB: {shown}; host_backup {memory['host_backup'] / (1 << 30):.3f}")
    yield Figure(f"device memory {when}", memory["used"] / 1e9, "GB")


def wait_for_backup(driver: StageDriver) -> float:
    """Return the seconds until the host memory for level 1 is ready."""
    start = time.monotonic()
    while time.monotonic() - start < BACKUP_TIMEOUT_S:
        memory = driver.worker.describe().memory_bytes
        if memory["host_backup"] >= memory["weights"] + memory["buffers"]:
            return time.monotonic() - start
        time.sleep(0.02)
    raise RuntimeError("the host memory for level 1 was not prepared: see the log")


def generate(
    driver: StageDriver, tokens: "np.ndarray[tuple[int], np.dtype[np.int64]]"
) -> list[bytes]:
    """Return greedy tokens of NUM_REQUESTS prompts, step by step; drops earlier requests."""
    driver.worker.on_attach()
    slots = np.arange(NUM_REQUESTS)
    assert tokens.size <= MAX_NUM_BATCHED_TOKENS, "one step takes all prompts"
    message, _ = driver.prefill(slots, PROMPT_LEN, NUM_TOKENS)
    replies = [driver.worker.execute_model(message, [tokens.astype("<i4").tobytes()])]
    for _ in range(NUM_TOKENS - 1):
        decode = ExecuteModel(
            **driver.ids(), total_num_scheduled_tokens=NUM_REQUESTS, scheduled=bitmap(slots)
        )
        replies.append(driver.worker.execute_model(decode, []))
    return [reply.result()[0].sampled_token_ids for reply in replies if reply is not None]


def chunk_figures(device: torch.device) -> Iterator[Figure]:
    """Yield the seconds to map and to unmap an arena, by chunk size."""
    for mib in CHUNKS_MIB:
        arena = open_arena(ARENA_BYTES, mib << 20, device)
        torch.cuda.synchronize(device)
        unmapped, mapped = [], []
        for _ in range(3):
            start = time.perf_counter()
            arena.unmap_all()
            middle = time.perf_counter()
            arena.map_all()
            mapped.append(time.perf_counter() - middle)
            unmapped.append(middle - start)
        arena.close()
        yield Figure(f"map 16 GiB by {mib} MiB", statistics.median(mapped), "s")
        yield Figure(f"unmap 16 GiB by {mib} MiB", statistics.median(unmapped), "s")


def main() -> None:
    """Measure, print, and with --out write a list of figures."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", type=Path, required=True)
    parser.add_argument("--device", choices=["cpu", "cuda"], default="cuda")
    parser.add_argument("--level", dest="levels", type=int, choices=[1, 2], action="append")
    parser.add_argument("--num-blocks", type=int, default=0, help="of the KV cache; 0: what fits")
    parser.add_argument("--cycles", type=int, default=5)
    parser.add_argument("--chunks", action="store_true")
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    options.model = options.model.resolve()
    options.levels = sorted(options.levels or [1, 2])
    figures = []
    if options.chunks and options.device == "cuda":
        torch.cuda.set_device(0)
        torch.zeros(1, device="cuda")
        for figure in chunk_figures(torch.device("cuda:0")):
            print(f"{figure.name:<36} {figure.value:9.4f} {figure.unit}")
    for figure in measure(options):
        floor = "" if figure.floor is None else f"  floor {figure.floor:.3f}"
        print(f"{figure.name:<36} {figure.value:9.4f} {figure.unit}{floor}", flush=True)
        figures.append(asdict(figure))
    if options.out is not None:
        options.out.write_text(json.dumps(figures, indent=1) + "\n")


if __name__ == "__main__":
    main()

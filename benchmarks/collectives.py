"""Times communication between the ranks of a group, on two or more devices: all-reduces in CUDA
graphs by every available method, and a hop between two pipeline stages with the return of the
tokens.

    python -m benchmarks.collectives --out FILE.json

One process per device; rank 1 writes. torch's symmetric-memory all-reduces are timed for comparison
if NVLink multicast is off (TORCH_SYMM_MEM_DISABLE_MULTICAST=1).
"""

import argparse
import json
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from pathlib import Path

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import _symmetric_memory as symm_mem

from worker_daemon.contracts.layer_ops import Norm, NormedSum
from worker_daemon.distributed.link import Link, RendezvousPoint
from worker_daemon.distributed.parallel_state import ParallelState
from worker_daemon.distributed.pp import STATUS_OK, HopShape, StageInbound, StageOutbound
from worker_daemon.distributed.rendezvous import RendezvousServer
from worker_daemon.distributed.tokens import TokenBroadcast
from worker_daemon.distributed.tp import tensor_parallel
from worker_daemon.kernels.launch import has_dependent_launch
from worker_daemon.kernels.norm import sum_and_norm
from worker_daemon.kernels.peer_reduce import PeerReduce

HOST = "127.0.0.1"
HIDDEN = 4096
ROWS = (1, 2, 4, 8, 16, 32, 64, 128, 256, 512)
HOP_TOKENS = (1, 64, 256, 2048, 8192)
IN_A_GRAPH = 50
REPLAYS = 15
HOPS = 40
BUSY_S = 2e-3
TIMEOUT_S = 30.0
EPS = 1e-5
DEPTH = 4


@dataclass(frozen=True, slots=True)
class Figure:
    """One measurement."""

    name: str
    num_bytes: int
    microseconds: float


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path)
    parser.add_argument("--rank", type=int)
    parser.add_argument("--places", nargs=2, help="PORT:SECRET")
    options = parser.parse_args()
    if options.rank is None:
        start_ranks(options.out)
        return
    figures = list(measure(options.rank, torch.cuda.device_count(), options.places))
    if options.rank == 1:  # the second of two stages measures the waits
        report(figures, options.out)


def start_ranks(out: Path | None) -> None:
    """Run this module once per device."""
    count = torch.cuda.device_count()
    servers = [RendezvousServer(HOST, size) for size in (count, 2)]
    command = [sys.executable, "-m", "benchmarks.collectives", "--places"]
    command += [f"{server.port}:{server.secret.hex()}" for server in servers]
    command += [] if out is None else ["--out", str(out)]
    ranks = [subprocess.Popen([*command, "--rank", str(rank)]) for rank in range(count)]
    codes = [rank.wait(300) for rank in ranks]
    if any(codes):
        raise SystemExit(f"the ranks ended with {codes}")


def measure(rank: int, size: int, places: list[str]) -> Iterator[Figure]:
    """Yield every figure; every rank makes the same calls."""
    device = torch.device("cuda", rank)
    torch.cuda.set_device(device)
    with torch.inference_mode():
        link = open_link(1, places[0], ParallelState(1, size, rank), device)
        yield from reductions(link, device)
        link.leave()
        if rank < 2:
            link = open_link(2, places[1], ParallelState(2, 1, rank), device)
            yield from hops(link, rank, device)
            link.leave()


def open_link(generation: int, place: str, state: ParallelState, device: torch.device) -> Link:
    port, secret = place.split(":")
    link = Link(generation, device)
    link.open(state, RendezvousPoint(HOST, int(port), bytes.fromhex(secret)), TIMEOUT_S)
    return link


def reductions(link: Link, device: torch.device) -> Iterator[Figure]:
    """Measure all-reduces of bf16 [rows, HIDDEN], alone and with the operations that follow in a
    layer."""
    assert link.peers.window is not None, "the ranks share no memory"
    reduce = PeerReduce(
        link.peers.window, device, pdl=has_dependent_launch(device), limit_bytes=1 << 40
    )
    for rows in ROWS:
        x = torch.randn(rows, HIDDEN, dtype=torch.bfloat16, device=device)
        ways = ways_to_reduce(link, reduce, x)
        for name, work in ways.items():
            yield Figure(name, x.numel() * 2, time_in_graph(work))


def ways_to_reduce(link: Link, reduce: PeerReduce, x: Tensor) -> dict[str, Callable[[], object]]:
    """Return name -> one all-reduce of x."""
    group, pdl = link.groups.stage, has_dependent_launch(x.device)
    assert group is not None, "more than one rank"
    source = NormedSum(x, torch.randn_like(x), Norm(torch.randn_like(x[0]), EPS))

    def nccl_and_norm() -> None:
        dist.all_reduce(x, group=group)
        sum_and_norm(source, pdl=pdl)

    ways: dict[str, Callable[[], object]] = {
        "nccl": lambda: dist.all_reduce(x, group=group),
        "nccl, then add and norm": nccl_and_norm,
    }
    if reduce.takes(x):
        ways["peer"] = lambda: reduce.all_reduce(x)
        ways["peer, then add and norm"] = lambda: sum_and_norm(
            source._replace(part=reduce.all_reduce(x)), pdl=pdl
        )
        ways["peer, add and norm in one"] = lambda: reduce.all_reduce_and_norm(source)
    if os.environ.get("TORCH_SYMM_MEM_DISABLE_MULTICAST") == "1":
        ways |= torchs_ways(group, x)
    return ways


def torchs_ways(group: dist.ProcessGroup, x: Tensor) -> dict[str, Callable[[], object]]:
    """Return torch's kernels over its symmetric memory."""
    name = group.group_name
    buffer = symm_mem.empty(x.numel(), dtype=x.dtype, device=x.device).zero_()
    symm_mem.rendezvous(buffer, name)
    return {
        "torch one-shot": lambda: torch.ops.symm_mem.one_shot_all_reduce(buffer, "sum", name),
        "torch two-shot": lambda: torch.ops.symm_mem.two_shot_all_reduce_(buffer, "sum", name),
    }


def time_in_graph(work: Callable[[], object]) -> float:
    """Return the microseconds per call in a graph of many, the median of its replays."""
    for _ in range(2):
        work()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, capture_error_mode="thread_local"):
        for _ in range(IN_A_GRAPH):
            work()
    times = []
    for _ in range(REPLAYS):
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        graph.replay()  # the ranks synchronize in it
        start.record()
        graph.replay()
        end.record()
        torch.cuda.synchronize()
        times.append(start.elapsed_time(end))
    return statistics.median(times[2:]) * 1e3 / IN_A_GRAPH


def hops(link: Link, rank: int, device: torch.device) -> Iterator[Figure]:
    """Measure a stage's communication: round trips, and the wait when there is other work."""
    ends = Ends(link, rank, device)
    for num_tokens in HOP_TOKENS:
        hidden = torch.randn(num_tokens, HIDDEN, dtype=torch.bfloat16, device=device)
        ends.round_trip(hidden)
        torch.cuda.synchronize()
        began = time.perf_counter()
        for _ in range(HOPS):
            ends.round_trip(hidden)
        launched = time.perf_counter()
        torch.cuda.synchronize()
        ended = time.perf_counter()
        size = hidden.numel() * 2
        yield Figure("hop and token return", size, (ended - began) / HOPS * 1e6)
        yield Figure("the same, launching alone", size, (launched - began) / HOPS * 1e6)
        waits = [ends.wait_after_other_work(hidden) for _ in range(9)]
        yield Figure("hop, left to wait for after 2 ms of work", size, statistics.median(waits))


class Ends:
    """One stage of two."""

    def __init__(self, link: Link, rank: int, device: torch.device) -> None:
        hop = HopShape(HIDDEN, torch.bfloat16, device, max(HOP_TOKENS), DEPTH)
        tp = tensor_parallel(0, 1)
        self.rank = rank
        self.outbound = StageOutbound(link, tp, hop) if rank == 0 else None
        self.inbound = StageInbound(link, tp, hop) if rank == 1 else None
        self.last_sampled = torch.zeros(256, dtype=torch.int64, device=device)
        refused = torch.zeros(256, dtype=torch.int32, device=device)
        self.tokens = TokenBroadcast(link, self.last_sampled, refused, num_stages=2, depth=DEPTH)
        self.rows = torch.arange(256, dtype=torch.int32, device=device)
        self.ok = torch.full((), STATUS_OK, dtype=torch.int64, device=device)
        self.seq = 0

    def round_trip(self, hidden: Tensor) -> None:
        """Run one step: activations one way, 256 tokens the other."""
        self.seq += 1
        if self.outbound is not None:
            self.outbound.send(hidden, hidden.shape[0], self.ok, self.seq)
            self.tokens.publish(self.seq, self.rows, None, counted=False)
            self.tokens.collect(self.seq)
        if self.inbound is not None:
            self.inbound.post(hidden.shape[0], self.seq).wait()
            self.tokens.publish(self.seq, self.rows, self.last_sampled, counted=False)

    def wait_after_other_work(self, hidden: Tensor) -> float:
        """Return the microseconds that the second stage waits for a step sent while it was busy
        with another; 0 on the first."""
        self.seq += 1
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        if self.outbound is not None:
            self.outbound.send(hidden, hidden.shape[0], self.ok, self.seq)
        if self.inbound is not None:
            torch.cuda._sleep(int(BUSY_S * 1.9e9))
            arrival = self.inbound.post(hidden.shape[0], self.seq)
            start.record()
            arrival.wait()
            end.record()
        self.tokens.publish(
            self.seq,
            self.rows,
            None if self.inbound is None else self.last_sampled,
            counted=False,
        )
        self.tokens.settle()
        torch.cuda.synchronize()
        return 0.0 if self.inbound is None else start.elapsed_time(end) * 1e3


def report(figures: list[Figure], out: Path | None) -> None:
    """Print a table, and write the figures as JSON."""
    for figure in figures:
        print(f"{figure.num_bytes >> 10:8} KiB  {figure.microseconds:9.1f} us  {figure.name}")
    if out is not None:
        record = {
            "device": torch.cuda.get_device_name(0),
            "devices": torch.cuda.device_count(),
            "torch": torch.__version__,
            "hidden": HIDDEN,
            "figures": [asdict(figure) for figure in figures],
        }
        out.write_text(json.dumps(record, indent=1))


if __name__ == "__main__":
    main()

"""One rank of a tensor-parallel group in the tests of all-reduces; run by test_all_reduce, one
process a device. argv: what to do, rank, ranks, seed, then PORT:SECRET for each link."""

import hashlib
import os
import random
import signal
import sys
import threading
import time

import torch

from benchmarks.layer_reference import normed
from rpc_schema.errors import CommError
from worker_daemon.backend import choose_backend
from worker_daemon.contracts.layer_ops import Norm, NormedSum
from worker_daemon.distributed.link import Link, RendezvousPoint
from worker_daemon.distributed.parallel_state import ParallelState
from worker_daemon.distributed.tp import tensor_parallel

HOST = "127.0.0.1"
EPS = 1e-5
TIMEOUT_S = 20.0
# One rounding of the sum, with the residual a second one; NCCL rounds once more a rank.
BOUNDS = {torch.float32: 1e-6, torch.float16: 1.5e-3, torch.bfloat16: 1e-2}
SHAPES = [(1, 4096), (3, 64), (129, 4096), (256, 1024), (700, 4096)]


class Group:
    """This process in a tensor-parallel group, link after link."""

    def __init__(self, rank, size):
        self.device = torch.device("cuda", rank)
        torch.cuda.set_device(self.device)
        self.state = ParallelState(1, size, rank)
        backend = choose_backend(self.device)
        self.tp = tensor_parallel(rank, size, backend.make_reducer)
        self.ops = backend.make_ops()
        self.link = None

    def open(self, generation, place):
        self.link = Link(generation, self.device)
        port, secret = place.split(":")
        place = RendezvousPoint(HOST, int(port), bytes.fromhex(secret))
        self.link.open(self.state, place, TIMEOUT_S)
        self.tp.bind(self.link.groups.stage, self.link.peers)
        assert "peer memory" in self.tp.all_reduce_name, self.tp.all_reduce_name


class Case:
    """Inputs of one reduction on the device; every rank can compute all ranks' inputs."""

    def __init__(self, group, seed):
        rng = random.Random(seed)
        generator = torch.Generator(group.device).manual_seed(rng.getrandbits(40))
        self.group = group
        self.dtype = rng.choice(list(BOUNDS))
        shape = rng.choice(SHAPES)
        self.is_fused = rng.random() < 0.5

        def draw(*size):
            drawn = torch.randn(size, generator=generator, device=group.device).to(self.dtype)
            return drawn.masked_fill(drawn.abs() < 0.1, -0.0)

        self.everyone = draw(group.state.world_size, *shape)
        self.residual = draw(*shape)
        self.norm = Norm(draw(shape[1]), EPS, rng.choice([0.0, 1.0]))
        self.sum_norm = rng.choice([None, Norm(draw(shape[1]), EPS, 1.0)])
        self.x = self.everyone[group.state.tp_rank].clone()

    def run(self):
        """The results: [sum], or [norm, sum]."""
        x, tp = self.x.clone(), self.group.tp
        if not self.is_fused:
            return [tp.all_reduce(x)]
        source = NormedSum(x, self.residual, self.norm, self.sum_norm)
        return list(tp.all_reduce_and_norm(source, self.group.ops.sum_and_norm))

    def check(self, results):
        total = self.everyone.double().sum(0)
        if self.is_fused:
            if self.sum_norm is not None:
                total = normed(total, self.sum_norm)
            total = total + self.residual.double()
            self.close(results[0], normed(results[1], self.norm))
        self.close(results[-1], total)

    def close(self, out, expected):
        error = float((out.double() - expected).norm() / expected.norm())
        assert error < BOUNDS[self.dtype], (error, self.dtype, out.shape)


def digest_of(results, digest):
    for result in results:
        digest.update(result.cpu().view(torch.uint8).numpy().tobytes())


def pause(rng):
    """Delay this rank's device."""
    torch.cuda._sleep(rng.choice([0, 0, 1000, 200_000]))


def eagerly(group, seed, digest):
    pauses = random.Random(f"{seed}/{group.state.rank}")
    for call in range(80):
        case = Case(group, f"{seed}/{call}")
        pause(pauses)
        results = case.run()
        case.check(results)
        digest_of(results, digest)


def capture(cases):
    """(graph, the results of its cases)."""
    for case in cases:
        case.run()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, capture_error_mode="thread_local"):
        results = [case.run() for case in cases]
    return graph, results


def in_graphs(group, seed, digest):
    """Graphs with odd and even numbers of reductions, in any order, with eager ones between."""
    pauses, order = random.Random(f"{seed}/{group.state.rank}"), random.Random(seed)
    batches = [
        [Case(group, f"{seed}/{graph}/{call}") for call in range(count)]
        for graph, count in enumerate([1, 4, 7, 16])
    ]
    graphs = [capture(cases) for cases in batches]
    for _ in range(60):
        which = order.randrange(len(graphs) + 1)
        pause(pauses)
        if which == len(graphs):
            eager = Case(group, f"{seed}/{order.random()}")
            eager.check(eager.run())
            continue
        graph, outputs = graphs[which]
        for results in outputs:
            for result in results:
                result.fill_(float("nan"))
        graph.replay()
        for case, results in zip(batches[which], outputs, strict=True):
            case.check(results)
            digest_of(results, digest)


def check(group, seed, places):
    group.open(1, places[0])
    digest = hashlib.sha256()
    eagerly(group, seed, digest)
    in_graphs(group, seed, digest)
    print(digest.hexdigest())


def relink(group, seed, places):
    """Link after link in the same processes."""
    digest = hashlib.sha256()
    for generation, place in enumerate(places, start=1):
        group.open(generation, place)
        eagerly(group, seed, digest)
        disposal = group.link.leave()
        if disposal is not None:
            disposal.join()  # a process that ends meanwhile is ended by C++
    print(digest.hexdigest())


def die(group, seed, places):
    """Kill this rank between two reductions, while the other ranks continue."""
    group.open(1, places[0])
    graph, _ = capture([Case(group, f"{seed}/{call}") for call in range(9)])
    for _ in range(20):
        graph.replay()
    torch.cuda.synchronize()
    os.kill(os.getpid(), signal.SIGKILL)


def survive(group, seed, places):
    """Wait for a killed peer in a graph until an abort, then link with a new process."""
    group.open(1, places[0])
    graph, _ = capture([Case(group, f"{seed}/{call}") for call in range(9)])
    for _ in range(25):
        graph.replay()
    aborted = threading.Timer(2.0, group.link.abort)
    aborted.start()
    began = time.monotonic()
    torch.cuda.synchronize()
    waited = time.monotonic() - began
    assert 1.0 < waited < 10.0, waited
    aborted.join()
    try:
        group.link.raise_if_aborted()
    except CommError:
        pass
    else:
        raise AssertionError("the link was aborted")
    del graph  # NCCL gives a communicator up only once no graph holds its kernels
    began = time.monotonic()
    group.link.leave()
    left = time.monotonic() - began
    fresh(group, seed, places)
    print(f"freed after {waited:.2f} s, left in {left:.2f} s", file=sys.stderr)


def fresh(group, seed, places):
    group.open(2, places[1])
    digest = hashlib.sha256()
    eagerly(group, seed, digest)
    print(digest.hexdigest())


ROLES = {"check": check, "relink": relink, "die": die, "survive": survive, "fresh": fresh}


if __name__ == "__main__":
    role, rank, size, seed, *places = sys.argv[1:]
    with torch.inference_mode():
        ROLES[role](Group(int(rank), int(size)), seed, places)

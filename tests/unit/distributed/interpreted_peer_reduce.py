"""The ranks of a group whose windows lie in a shared file, reducing under Triton's interpreter; run
by test_peer_reduce. argv: see run_ranks.

Checks every result against torch in fp64 and prints a digest of all of its bits.
"""

import hashlib
import mmap
import os
import random
import sys
import threading
import time
import traceback
from pathlib import Path

import numpy as np
import torch

from benchmarks.layer_reference import normed
from worker_daemon.contracts.layer_ops import Norm, NormedSum
from worker_daemon.kernels.peer_reduce import PeerReduce

CPU = torch.device("cpu")
BLANK = -0x7FFF8000
WINDOW_BYTES = 1 << 16
CALLS = 8
EPS = 1e-5
STOP_AFTER_S = 0.5
# The interpreter cuts bf16 off where a device rounds; the sum of three roundings stays below this.
BOUNDS = {torch.float16: 3e-3, torch.bfloat16: 3e-2}

torch.set_num_threads(1)


class Window:
    """All ranks' windows one after another in the file, then the start counter."""

    blank = BLANK
    num_bytes = WINDOW_BYTES

    def __init__(self, rank, size, path):
        with path.open("r+b") as file:
            self.map = mmap.mmap(file.fileno(), 0)
        self.memory = np.frombuffer(self.map, np.int32)
        self.stop = np.zeros(1, np.int32)
        base = self.memory.ctypes.data
        self.rank = rank
        self.addresses = [base + peer * WINDOW_BYTES for peer in range(size)]
        self.stop_address = self.stop.ctypes.data


def inputs(call, seed, size):
    """(x of every rank, residual, norm, norm of the sum, whether fused) of a call: random sizes,
    some -0.0."""
    rng = random.Random(f"{seed}/{call}")
    generator = torch.Generator().manual_seed(rng.getrandbits(40))
    rows, hidden = rng.choice([1, 2, 3, 4, 5, 8]), rng.choice([8, 24, 64])
    dtype = rng.choice(list(BOUNDS))
    shape = (size + 1, rows, hidden)
    values = torch.randn(shape, generator=generator).to(dtype)
    values[torch.rand(shape, generator=generator) < 0.3] = -0.0
    weights = torch.randn(2, hidden, generator=generator).to(dtype)
    norm, sum_norm = (Norm(weight, EPS, rng.choice([0.0, 1.0])) for weight in weights)
    return values[:size], values[size], norm, rng.choice([None, sum_norm]), rng.random() < 0.5


def check(out, expected):
    error = (out.double() - expected).norm() / expected.norm().clamp(min=1e-9)
    assert error < BOUNDS[out.dtype], float(error)


def reduce_and_check(reduce, rank, values, residual, norm, sum_norm, is_fused):
    x = values[rank].clone()
    assert reduce.takes(x)
    total = values.double().sum(0)
    if not is_fused:
        out = reduce.all_reduce(x)
        check(out, total)
        results = [out]
    else:
        source = NormedSum(x, residual, norm, sum_norm)
        results = list(reduce.all_reduce_and_norm(source))
        added = total if sum_norm is None else normed(total, sum_norm)
        check(results[1], residual.double() + added)
        check(results[0], normed(results[1], norm))
    assert torch.equal(x, values[rank])
    return results


def main(rank, size, path, seed, calls):
    window = Window(rank, size, path)
    reduce = PeerReduce(window, CPU, pdl=False, max_programs=3, polls_per_stop=16)
    digest = hashlib.sha256()
    if calls < 0:  # the peers never come
        began = time.monotonic()
        threading.Timer(STOP_AFTER_S, lambda: window.stop.fill(1)).start()
        reduce.all_reduce(torch.ones(3, 8, dtype=torch.float16))
        assert time.monotonic() - began >= STOP_AFTER_S / 2
    for call in range(calls):
        for result in reduce_and_check(reduce, rank, *inputs(call, seed, size)):
            digest.update(result.view(torch.int16).numpy().tobytes())
    sys.stdout.write(f"{digest.hexdigest()}\n")  # in one piece: ranks share the pipe


def run_ranks(main):
    """Run main(rank, size, path, seed, calls) as each rank, in a fork of this process each: the
    imports take most of the time. argv: ranks, how many of them there are in fact, file, seed,
    calls."""
    size, present, path, seed, calls = sys.argv[1:]
    children = []
    for rank in range(int(present)):
        children.append(os.fork())
        if not children[-1]:
            has_failed = 1
            try:
                main(rank, int(size), Path(path), seed, int(calls))
                has_failed = 0
            except BaseException:
                traceback.print_exc()
            finally:
                sys.stdout.flush()
                sys.stderr.flush()
                os._exit(has_failed)
    sys.exit(max(os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) for pid in children))


if __name__ == "__main__":
    run_ranks(main)

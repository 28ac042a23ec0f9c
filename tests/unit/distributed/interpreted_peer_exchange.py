"""The ranks of a group whose windows lie in a shared file, exchanging rows under Triton's
interpreter; run by test_peer_exchange. argv: see interpreted_peer_reduce.run_ranks.

Checks every result against torch, with bits where they are only moved.
"""

import random
import threading
import time

import torch
from interpreted_peer_reduce import BOUNDS, CPU, STOP_AFTER_S, Window, run_ranks

from worker_daemon.contracts.experts import RoutedTokens
from worker_daemon.kernels.peer_exchange import PeerExchange

EXCHANGES = 5
LIMITS = {**BOUNDS, torch.float32: 1e-6}
PROGRAMS = 3


def inputs(call, seed, size):
    """(num_rows, x, experts and weights of every rank, parts of the sums) of an exchange: random
    sizes, some ranks without tokens, some -0.0."""
    rng = random.Random(f"{seed}/{call}")
    generator = torch.Generator().manual_seed(rng.getrandbits(40))
    num_rows, hidden = rng.choice([1, 2, 3, 4, 5, 8]), rng.choice([8, 24, 64])
    top_k, dtype = rng.choice([1, 2, 5]), rng.choice(list(LIMITS))
    counts = [rng.choice([0, num_rows, rng.randint(0, num_rows)]) for _ in range(size)]
    values = [torch.randn(count, hidden, generator=generator).to(dtype) for count in counts]
    for each in values:
        each[torch.rand(each.shape, generator=generator) < 0.3] = -0.0
    routed = [
        RoutedTokens(
            torch.randint(0, 60, (count, top_k), generator=generator, dtype=torch.int32),
            torch.rand(count, top_k, generator=generator),
        )
        for count in counts
    ]
    parts = torch.randn(size, size * num_rows, hidden, generator=generator).to(dtype)
    return num_rows, values, routed, parts


def padded(tensors, num_rows, fill):
    rows = [
        torch.cat([each, each.new_full((num_rows - each.shape[0], each.shape[1]), fill)])
        for each in tensors
    ]
    return torch.cat(rows)


def exchange_and_check(exchange, rank, num_rows, values, routed, parts):
    hidden, top_k = values[0].shape[1], routed[0].experts.shape[1]
    assert exchange.most_rows(hidden, top_k, values[0].dtype) >= num_rows
    tokens, found = exchange.gather(values[rank], routed[rank], num_rows)
    assert torch.equal(tokens, padded(values, num_rows, 0))
    assert torch.equal(found.experts, padded([each.experts for each in routed], num_rows, -1))
    assert torch.equal(found.weights, padded([each.weights for each in routed], num_rows, 0))
    sums = exchange.sum_rows(parts[rank].clone())
    own = slice(rank * num_rows, (rank + 1) * num_rows)
    expected = parts[:, own].double().sum(0)
    error = (sums.double() - expected).norm() / expected.norm()
    assert error < LIMITS[sums.dtype], float(error)


def main(rank, size, path, seed, exchanges):
    window = Window(rank, size, path)
    exchange = PeerExchange(window, CPU, pdl=False, max_programs=PROGRAMS, polls_per_stop=16)
    if exchanges < 0:  # the peers never come
        began = time.monotonic()
        threading.Timer(STOP_AFTER_S, lambda: window.stop.fill(1)).start()
        nothing = RoutedTokens(torch.zeros(0, 2, dtype=torch.int32), torch.zeros(0, 2))
        _, found = exchange.gather(torch.zeros(0, 8), nothing, 4)
        assert (found.experts == -1).all(), "no expert that does not exist"
        exchange.sum_rows(torch.zeros(4 * size, 8))
        assert time.monotonic() - began >= STOP_AFTER_S / 2
    for call in range(exchanges):
        exchange_and_check(exchange, rank, *inputs(call, seed, size))


if __name__ == "__main__":
    run_ranks(main)

"""All-reduces of a tensor-parallel group over peer memory and NCCL, on two devices and more."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from worker_daemon.distributed.rendezvous import RendezvousServer

pytestmark = pytest.mark.multi_gpu
SCRIPT = Path(__file__).with_name("all_reduce_rank.py")
ROOT = SCRIPT.parents[2]


@pytest.fixture
def places():
    """(count, size) -> as many places where links of this size can meet: PORT:SECRET."""
    servers = []

    def make(count, size):
        servers.extend(RendezvousServer("127.0.0.1", size) for _ in range(count))
        return [f"{server.port}:{server.secret.hex()}" for server in servers]

    yield make
    for server in servers:
        server.close()


def needs(count):
    if torch.cuda.device_count() < count:
        pytest.skip(f"needs {count} CUDA devices")


def start(role, rank, size, seed, places):
    words = [role, rank, size, seed, *places]
    paths = os.pathsep.join([str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])])
    return subprocess.Popen(
        [sys.executable, str(SCRIPT), *map(str, words)],
        cwd=ROOT,
        env=os.environ | {"PYTHONPATH": paths},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


def finish(*processes):
    """The digest that all of them print."""
    outputs = [process.communicate(timeout=110) for process in processes]
    errors = "\n".join(f"rank {rank}: {text}" for rank, (_, text) in enumerate(outputs))
    assert not any(process.returncode for process in processes), errors
    print(errors[-600:])
    (digest,) = {out.strip() for out, _ in outputs}
    return digest


@pytest.mark.parametrize("size", [2, 4, 8])
def test_every_rank_gets_the_same_right_bits(places, size):
    needs(size)
    meetings = places(1, size)
    processes = [start("check", rank, size, "a", meetings) for rank in range(size)]
    assert finish(*processes)


def test_links_follow_each_other(places):
    needs(2)
    meetings = places(3, 2)
    processes = [start("relink", rank, 2, "b", meetings) for rank in range(2)]
    assert finish(*processes)


def test_survivor_of_a_killed_peer_links_anew_with_a_fresh_process(places):
    needs(2)
    meetings = places(2, 2)
    survivor, killed = start("survive", 0, 2, "c", meetings), start("die", 1, 2, "c", meetings)
    killed.communicate(timeout=110)
    fresh = start("fresh", 1, 2, "c", meetings)
    assert finish(survivor, fresh)

"""One rank of a trainer whose ranks send shards. argv: file for torch's rendezvous, rank, number of
ranks, directory of the weights, cut, number of sends, exchanges after which it kills itself (-1:
never)."""

import os
import signal
import sys
import time
from pathlib import Path

import torch
import torch.distributed as dist
from safetensors.torch import load_file
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard, distribute_tensor

from worker_client.trainer.communicator import Communicator, TransferStopped
from worker_client.trainer.deltas import TensorPiece
from worker_client.trainer.shards import ShardChannel, ShardSender, shards_of

PACKED_BYTES = 20_000


def join(path, rank, size):
    """Begin the trainer's own process group."""
    dist.init_process_group("gloo", init_method=f"file://{path}", rank=rank, world_size=size)


def cut(state, rank, size, kind):
    """What a rank has of the tensors. rows: DTensors in FSDP's shards; columns: by hand, and all of
    each vector on every rank."""
    if kind == "rows":
        mesh = init_device_mesh("cpu", (size,))
        return shards_of({n: distribute_tensor(t, mesh, [Shard(0)]) for n, t in state.items()})
    found = {}
    for name, tensor in state.items():
        if tensor.dim() < 2:
            found[name] = tensor
            continue
        bounds = torch.linspace(0, tensor.shape[1], size + 1).int().tolist()
        own = tensor[:, bounds[rank] : bounds[rank + 1]]
        found[name] = [TensorPiece((0, bounds[rank]), own)]
    return found


def die_after(lifetime):
    """Kill this process instead of another exchange."""
    left, original = [lifetime], Communicator.send_shards

    def send_shards(communicator, payload, sizes):
        if left[0] == 0:
            os.kill(os.getpid(), signal.SIGKILL)
        left[0] -= 1
        return original(communicator, payload, sizes)

    Communicator.send_shards = send_shards


def hear_late():
    """Ask rank 0 how a round ended when it may want to leave already."""
    original = ShardChannel.hear

    def hear(channel, key, timeout_s):
        time.sleep(0.3)
        return original(channel, key, timeout_s)

    ShardChannel.hear = hear


def main(path, rank, size, directory, kind, sends, lifetime):
    join(path, int(rank), int(size))
    die_after(int(lifetime))
    hear_late()
    shards = cut(load_file(Path(directory) / "model.safetensors"), int(rank), int(size), kind)
    with ShardSender("gloo", None, timeout_s=20) as sender:
        for _ in range(int(sends)):
            try:
                print("version", sender.send(shards, packed_bytes=PACKED_BYTES).version, flush=True)
            except TransferStopped as error:
                print("stopped", " ".join(str(error).split()), flush=True)
    dist.destroy_process_group()


if __name__ == "__main__":
    main(*sys.argv[1:])

"""A trainer in a separate process that dies. argv: backend, number of workers, file of the
weights, number of broadcasts before it kills itself (-1: it sends nothing), round. Prints its port
and secret; a line on stdin lets it send."""

import os
import signal
import sys

from safetensors.torch import load_file

from worker_client.trainer.broadcast import BroadcastChannel
from worker_client.trainer.communicator import Communicator


class Lifetime:
    """Ends its process after some broadcasts."""

    def __init__(self):
        self.left = 0
        original = Communicator.broadcast

        def broadcast(communicator, payload):
            if self.left == 0:
                os.kill(os.getpid(), signal.SIGKILL)
            self.left -= 1
            return original(communicator, payload)

        Communicator.broadcast = broadcast


def main(backend, num_workers, file, lifetime, number):
    tensors = load_file(file)
    device = "cuda:1" if backend == "nccl" else "cpu"
    life = Lifetime()
    channel = BroadcastChannel(backend, int(num_workers), device=device, timeout_s=60)
    place = channel.engine.place
    print(place.port, place.secret.hex(), flush=True)
    life.left = 1  # the first byte after the rendezvous
    channel.open()
    tensors = {name: tensor.to(device) for name, tensor in tensors.items()}
    life.left = int(lifetime)
    sys.stdin.readline()
    if life.left >= 0:
        channel.send(list(tensors.values()), round=int(number))


if __name__ == "__main__":
    main(*sys.argv[1:])

"""A pool of processes that play the ranks of a group over gloo on the loopback interface. Each runs
functions of link_scenarios by name and answers with what they return or raise.
"""

import multiprocessing
import os
import traceback

ANSWER_S = 100.0
"""However busy the host is: they import torch."""


def serve(pipe):
    """Run requested functions in a pool process until the pipe closes."""
    os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    import link_scenarios  # imports torch, which reads the environment

    pipe.send(("returned", None))
    while True:
        try:
            name, args = pipe.recv()
        except EOFError:
            return
        try:
            pipe.send(("returned", getattr(link_scenarios, name)(*args)))
        except Exception as error:
            pipe.send(("raised", (type(error).__name__, str(error), traceback.format_exc())))


class RemoteFailure(AssertionError):
    """A scenario raised where it should not have."""


class Rank:
    """One pool process. Its first outcome comes when it is ready for its first function."""

    def __init__(self):
        context = multiprocessing.get_context("spawn")
        self.pipe, theirs = context.Pipe()
        self.process = context.Process(target=serve, args=(theirs,), daemon=True)
        self.process.start()
        theirs.close()

    def start(self, name, *args):
        self.pipe.send((name, args))

    def outcome(self):
        """("returned", value) or ("raised", (type, text, traceback))."""
        if not self.pipe.poll(ANSWER_S):
            raise RemoteFailure("a rank does not answer")
        return self.pipe.recv()

    def kill(self):
        self.process.kill()
        self.process.join()
        self.pipe.close()


class Pool:
    """Up to four ranks, started when they are first needed and kept for the next test."""

    def __init__(self):
        self.ranks = []

    def grow(self, size):
        """Makes it so many, all of them ready: none waits in a rendezvous for another to start."""
        fresh = [Rank() for _ in range(len(self.ranks), size)]
        self.ranks += fresh
        for rank in fresh:
            rank.outcome()

    def replace(self, index):
        """Puts a fresh process in a killed one's place."""
        self.ranks[index] = Rank()
        self.ranks[index].outcome()

    def start(self, size, name, *args):
        """Starts name(rank, *args) on the first `size` ranks."""
        self.grow(size)
        for index, rank in enumerate(self.ranks[:size]):
            rank.start(name, index, *args)

    def results(self, size):
        """Waits for all; RemoteFailure if any raised."""
        outcomes = [rank.outcome() for rank in self.ranks[:size]]
        for index, (kind, value) in enumerate(outcomes):
            if kind == "raised":
                raise RemoteFailure(f"rank {index}: {value[2]}")
        return [value for _, value in outcomes]

    def run(self, size, name, *args):
        self.start(size, name, *args)
        return self.results(size)

    def close(self):
        for rank in self.ranks:
            rank.kill()
        self.ranks = []

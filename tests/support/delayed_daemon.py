"""`python -m tests.support.delayed_daemon JOURNAL SEED OPTIONS`: the real daemon, whose worker
waits randomly before and after every step, and records its times in a journal."""

import json
import random
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

from rpc_schema.step import ExecuteModel, SampleTokens
from tests.support.forked_daemons import ForkedDaemons
from worker_daemon.server import assembly
from worker_daemon.server.dispatch import PendingReply, WorkerLike
from worker_daemon.settings import load_settings, prepare_environment

LONGEST_DELAY_S = 0.03


class Stay(NamedTuple):
    """A step on one rank, by the monotonic clock that all processes of a host share."""

    seq: int
    begin: float
    end: float
    epoch: int = 0


class DelayedDaemons(ForkedDaemons):
    """Local daemons on the CPU with delayed steps."""

    def __init__(self, count: int, model_root: Path, journals: Path) -> None:
        """journals: an empty directory."""
        self._journals = [journals / f"{rank}.jsonl" for rank in range(count)]
        self._left = list(enumerate(self._journals))
        self._model_root = model_root
        super().__init__(["cpu"] * count, model_root, command=self._entry)

    def _entry(self, endpoint: str, device: str, pipe: int) -> Sequence[str]:
        seed, journal = self._left.pop(0)
        options = {
            "endpoint": endpoint,
            "device": device,
            "model-root": str(self._model_root),
            "exit-with-parent-fd": str(pipe),
        }
        module = "tests.support.delayed_daemon"
        return (sys.executable, "-m", module, str(journal), str(seed), json.dumps(options))

    def stays(self) -> list[list[Stay]]:
        """What each rank has done so far."""
        return list(map(read_journal, self._journals))


def read_journal(journal: Path) -> list[Stay]:
    """What a daemon has done so far."""
    return [Stay(**json.loads(line)) for line in journal.read_text().splitlines()]


def most_steps_at_once(stays: Sequence[Sequence[Stay]]) -> int:
    """Return the maximum number of different steps that ranks executed at the same time."""
    everywhere = [stay for of_rank in stays for stay in of_rank]
    return max(
        len({other.seq for other in everywhere if other.begin <= stay.begin < other.end})
        for stay in everywhere
    )


class DelayedWorker:
    """A worker with delayed steps; otherwise the real one."""

    def __init__(self, worker: WorkerLike, journal: Path, seed: int) -> None:
        self._worker = worker
        self._journal = journal.open("a")
        self._random = random.Random(seed)

    def __getattr__(self, name: str) -> object:
        return getattr(self._worker, name)

    def execute_model(self, message: ExecuteModel, arrays: Sequence[bytes]) -> PendingReply | None:
        begin = time.monotonic()
        self._dawdle()
        reply = self._worker.execute_model(message, arrays)
        self._dawdle()
        stay = Stay(message.seq, begin, time.monotonic(), message.epoch)
        print(json.dumps(stay._asdict()), file=self._journal, flush=True)
        return reply

    def sample_tokens(self, message: SampleTokens, arrays: Sequence[bytes]) -> PendingReply | None:
        self._dawdle()
        return self._worker.sample_tokens(message, arrays)

    def _dawdle(self) -> None:
        time.sleep(self._random.uniform(0, LONGEST_DELAY_S))


def main(journal: str, seed: str, options: str) -> int:
    """Serve with another worker."""
    make_worker = assembly.make_worker

    def make_delayed(*of: object, **options: object) -> WorkerLike:
        return DelayedWorker(make_worker(*of, **options), Path(journal), int(seed))

    assembly.make_worker = make_delayed
    prepare_environment()
    return assembly.run_daemon(load_settings(json.loads(options), None))


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))

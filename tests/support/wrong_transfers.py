"""`python -m tests.support.wrong_transfers WRONGS_FILE serve ...`: the real daemon, whose messages
to the ranks of another group, and whose blocks in host memory, go wrong as a file says, or which is
killed among them."""

import json
import os
import random
import signal
import sys
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

import numpy as np
import pytest

from tests.support.forked_daemons import ForkedDaemons
from worker_daemon.__main__ import main as run_command_line
from worker_daemon.server import assembly

MOST_DELAY_S = 0.03
MESSAGE_KINDS = ("flip", "drop", "double", "delay", "truncate")
SLOT_KINDS = ("slot flip", "slot zero", "slot cut", "slot copy")
KILL = "kill"


@dataclass(frozen=True)
class Wrongs:
    """What goes wrong with one of so many messages or slots, at random."""

    seed: int = 0
    kinds: Sequence[str] = ()
    """Of MESSAGE_KINDS, for a message that is sent; of SLOT_KINDS, for a slot that a step loads or
    has stored; kill, also for a message that is received."""
    one_of: int = 1
    most: int = 1
    """Number of messages and slots that go wrong at most."""


NOTHING = Wrongs()


class WrongsFile:
    """The mailbox between a fuzzer and one daemon."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._log = path.with_suffix(".log")

    def put(self, wrongs: Wrongs) -> None:
        """Have this go wrong from now on."""
        draft = self._path.with_suffix(".draft")
        draft.write_text(json.dumps(asdict(wrongs)))
        draft.rename(self._path)

    def get(self) -> Wrongs:
        """What was put last."""
        return Wrongs(**json.loads(self._path.read_text())) if self._path.exists() else NOTHING

    def note(self, kind: str) -> None:
        """Record that something has gone wrong."""
        with self._log.open("a") as log:
            log.write(f"{kind}\n")

    def take_noted(self) -> list[str]:
        """What has gone wrong since the last call."""
        if not self._log.exists():
            return []
        noted = self._log.read_text().splitlines()
        self._log.unlink()
        return noted


class WrongDaemons(ForkedDaemons):
    """Local daemons with a mailbox each, and places for the KV blocks that they leave."""

    def __init__(
        self,
        num_daemons: int,
        model_root: Path,
        directory: Path,
        kept: Path | None = None,
        file_bytes: int = 0,
    ) -> None:
        """directory: of the mailboxes and, if there are file_bytes, of files of blocks. kept: on a
        tmpfs, for host tiers that outlive their daemons; None: they end with these."""
        ranks = range(num_daemons)
        self.wrongs = [WrongsFile(directory / f"{rank}.wrongs") for rank in ranks]
        self.tiers = [] if kept is None else [kept / str(rank) for rank in ranks]
        """Directories of host tiers, by daemon."""
        self.files = [directory / f"{rank}.files" for rank in ranks] if file_bytes else []
        """Directories of files, by daemon."""

        def command(endpoint: str, device: str, pipe: int) -> Sequence[str]:
            rank = int(endpoint.rpartition("/w")[2])
            entry = (sys.executable, "-m", "tests.support.wrong_transfers")
            options = ["serve", "--endpoint", endpoint, "--device", device]
            options += ["--model-root", str(model_root), "--lora-root", str(model_root)]
            options += ["--exit-with-parent-fd", str(pipe)]
            if self.tiers:
                options += ["--kv-host-dir", str(self.tiers[rank])]
            if self.files:
                options += ["--kv-file-dir", str(self.files[rank])]
                options += ["--kv-file-bytes", str(file_bytes)]
            return (*entry, str(directory / f"{rank}.wrongs"), *options)

        super().__init__(["cpu"] * num_daemons, model_root, command=command)


class Going:
    """Decides what goes wrong with each message and slot, in their order."""

    def __init__(self, mailbox: WrongsFile) -> None:
        self._mailbox = mailbox
        self._wrongs = NOTHING
        self._rng = random.Random()
        self._left = 0

    def kind(self, possible: Sequence[str]) -> str:
        """What goes wrong with the next message or slot; empty: nothing."""
        wrongs = self._mailbox.get()
        if wrongs != self._wrongs:
            self._wrongs, self._left = wrongs, wrongs.most
            self._rng.seed(wrongs.seed)
        kinds = [kind for kind in wrongs.kinds if kind in possible]
        if not kinds or not self._left or self._rng.randrange(wrongs.one_of):
            return ""
        self._left -= 1
        kind = self._rng.choice(kinds)
        self._mailbox.note(kind)
        if kind == KILL:
            self._mailbox.put(NOTHING)  # its successor lives
            os.kill(os.getpid(), signal.SIGKILL)
        return kind

    def changed(self, kind, tensor):
        """The tensors that are sent in the place of one."""
        rng = self._rng
        if kind == "delay":
            time.sleep(rng.uniform(0.0, MOST_DELAY_S))
        if kind == "drop":
            return []
        if kind == "double":
            return [tensor, tensor]
        if kind == "flip":
            tensor = tensor.clone()
            self._flip(tensor.numpy().reshape(-1).view(np.uint8))
        if kind == "truncate":
            import torch  # the daemon has loaded it

            raw = tensor.contiguous().view(torch.uint8).flatten()
            tensor = raw[: rng.randrange(1, raw.numel())].clone()
        return [tensor]

    def change_slot(self, kind, slots, number):
        """Change a slot of host memory, uint8 [slots, bytes of one]."""
        own, rng = slots[number], self._rng
        if kind == "slot flip":
            self._flip(own)
        elif kind == "slot zero":
            own[:] = 0
        elif kind == "slot cut":  # the rest never came
            own[rng.randrange(own.size) :] = 0
        elif kind == "slot copy":
            own[:] = slots[rng.randrange(len(slots))]

    def _flip(self, raw):
        for _ in range(self._rng.choice([1, 2, 64, 512])):
            raw[self._rng.randrange(raw.size)] ^= 1 << self._rng.randrange(8)


def main(patch: pytest.MonkeyPatch) -> None:
    """Run the daemon's own command line, with messages and slots that go wrong."""
    going = Going(WrongsFile(Path(sys.argv.pop(1))))
    make_worker = assembly.make_worker

    def make_wrong(*args: object, **options: object) -> object:
        worker = make_worker(*args, **options)
        from worker_daemon.distributed.peer_channel import PeerChannel  # they load torch
        from worker_daemon.runner.connectors.host_tier import HostTier, Moves

        send, receive, store = PeerChannel.send, PeerChannel.receive, HostTier.store
        store_in_step = HostTier.store_in_step

        def send_wrongly(self, messages):
            changed = []
            for rank, tensor in messages:
                kind = going.kind((*MESSAGE_KINDS, KILL))
                changed += [(rank, each) for each in going.changed(kind, tensor)]
            send(self, changed)

        def receive_wrongly(self, messages):
            going.kind((KILL,))
            receive(self, messages)

        def change(self, numbers):
            slots = self._host.numpy().view(np.uint8)
            for number in numbers.tolist():
                going.change_slot(going.kind(SLOT_KINDS), slots, number)

        def store_wrongly(self, step):
            moves = [each for _, each in step.step_values.data if isinstance(each, Moves)]
            for each in moves:
                change(self, each.load_slots)
            store(self, step)
            for each in moves:
                change(self, each.store_slots)

        patch.setattr(PeerChannel, "send", send_wrongly)
        patch.setattr(PeerChannel, "receive", receive_wrongly)

        def store_wrongly_in_step(self, step):
            found = store_in_step(self, step)
            if found is not None:
                end = found.end
                moves = [each for _, each in step.step_values.data if isinstance(each, Moves)]

                def end_wrongly():
                    end()
                    for each in moves:
                        change(self, each.filled_slots)

                found.end = end_wrongly
            return found

        patch.setattr(HostTier, "store", store_wrongly)
        patch.setattr(HostTier, "store_in_step", store_wrongly_in_step)
        return worker

    patch.setattr(assembly, "make_worker", make_wrong)
    run_command_line()


if __name__ == "__main__":
    with pytest.MonkeyPatch.context() as monkeypatch:
        main(monkeypatch)

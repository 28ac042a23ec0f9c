"""Two hosts as network namespaces of an unprivileged user, and a cable between them that drops
packets on request: silently, like a broken switch or a firewall."""

import shutil
import subprocess
from collections.abc import Sequence
from typing import Literal

import pytest

NEAR_ADDRESS = "10.231.0.1"
FAR_ADDRESS = "10.231.0.2"
LIFETIME_S = 600
_COMMANDS = ("unshare", "nsenter", "ip", "ss", "tc")

Side = Literal["near", "far"]


class TwoHosts:
    """`near` and `far`, each with a loopback device and one end of the cable. The caller ends the
    processes in them; close() then ends the namespaces."""

    def __init__(self) -> None:
        """Make them; skip the test if that is impossible."""
        if not all(map(shutil.which, _COMMANDS)):
            pytest.skip(f"needs {', '.join(_COMMANDS)}")
        self._holders: list[subprocess.Popen[str]] = []
        self._hold(["unshare", "-Urn"])
        self._hold([*self.within("near"), "unshare", "-n"])
        far = str(self._holders[1].pid)
        cable = ("veth-near", "type", "veth", "peer", "name", "veth-far", "netns", far)
        self._run("near", "ip", "link", "add", "name", *cable)
        for side, address in (("near", NEAR_ADDRESS), ("far", FAR_ADDRESS)):
            self._run(side, "ip", "addr", "add", f"{address}/30", "dev", f"veth-{side}")
            self._run(side, "ip", "link", "set", f"veth-{side}", "up")

    def within(self, side: Side) -> list[str]:
        """Return the command prefix that runs another command on that host."""
        pid = str(self._holders[side == "far"].pid)
        return ["nsenter", "-t", pid, "-U", "-n", "--preserve-credentials"]

    def lose(self, *senders: Side) -> None:
        """Drop all packets that these hosts send to the other one, from now on."""
        for side in senders:
            self._run(side, "tc", "qdisc", "replace", "dev", f"veth-{side}", "root", *_NO_ROOM)

    def heal(self) -> None:
        """Stop dropping packets."""
        for side in ("near", "far"):
            queue = self._run(side, "tc", "qdisc", "show", "dev", f"veth-{side}")
            if "pfifo" in queue:
                self._run(side, "tc", "qdisc", "del", "dev", f"veth-{side}", "root")

    def connected_ports(self) -> set[int]:
        """Return the ports of `far` to which `near` has a TCP connection."""
        lines = self._run("near", "ss", "-tnH", "state", "established", "dst", FAR_ADDRESS)
        return {int(line.split()[3].rpartition(":")[2]) for line in lines.splitlines()}

    def close(self) -> None:
        """End both."""
        for holder in self._holders:
            holder.kill()
            holder.communicate()

    def _hold(self, command: Sequence[str]) -> None:
        """Start the process that keeps a namespace alive."""
        script = f"ip link set lo up && echo up && exec sleep {LIFETIME_S}"
        holder = subprocess.Popen(
            [*command, "sh", "-c", script],
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        self._holders.append(holder)
        assert holder.stdout is not None and holder.stderr is not None
        if holder.stdout.readline() != "up\n":
            reason = holder.stderr.read().strip()
            self.close()
            pytest.skip(f"no network namespaces here: {reason}")

    def _run(self, side: Side, *command: str) -> str:
        done = subprocess.run(
            [*self.within(side), *command], capture_output=True, text=True, check=False
        )
        if done.returncode != 0:
            self.close()
            pytest.skip(f"{' '.join(command)}: {done.stderr.strip()}")
        return done.stdout


_NO_ROOM = ("pfifo", "limit", "0")
"""A queue that drops everything."""

"""A host of its own for systemd: PID 1 of new namespaces, over a copy-on-write view of this
machine's files, of which nothing is left. Needs root. Units, commands and files in there are real;
the kernel, the network and the GPUs are this machine's.
"""

import os
import select
import shutil
import subprocess
import sys
import time
from pathlib import Path
from typing import Final

from tests.support.waiting import PATIENCE_S

REPOSITORY: Final = Path(__file__).resolve().parents[2]
UNITS: Final = REPOSITORY / "docker" / "systemd"
PREFIX: Final = "/opt/worker-daemon"
"""Prefix of the programs in the units."""

_BOOT: Final = """
set -e
mount -t tmpfs tmpfs "$1"
mkdir "$1/upper" "$1/work" "$1/root"
mount -t overlay overlay -o "lowerdir=/,upperdir=$1/upper,workdir=$1/work" "$1/root"
cd "$1/root"
mount -t proc proc proc
mount --rbind /sys sys
mount --rbind /dev dev
mount -t tmpfs tmpfs run
mount -t tmpfs tmpfs tmp
chmod 1777 tmp
mkdir -p run/lock old
pivot_root . old
umount -l /old
export container=lxc
exec /lib/systemd/systemd --system --unit=rescue.target --show-status=no
"""

_PROGRAM: Final = """#!/bin/sh
export LD_LIBRARY_PATH=/opt/python/lib PYTHONDONTWRITEBYTECODE=1 OMP_NUM_THREADS=1
export PYTHONPATH={repository}:{repository}/client:{packages}
exec /opt/python/bin/{python} -m {module} "$@"
"""


class SystemdHost:
    """Boots on entry, and is gone on exit. The package is installed as in docs/deployment.md."""

    def __init__(self, scratch: Path) -> None:
        """scratch: an empty directory."""
        self._scratch = scratch
        self._process: subprocess.Popen[bytes] | None = None
        self._init = 0

    @staticmethod
    def lacks() -> str:
        """Return what this machine lacks for it; empty if nothing."""
        if os.geteuid() != 0:
            return "root"
        tools = ("unshare", "nsenter", "pivot_root", "setpriv", "/lib/systemd/systemd")
        return next((tool for tool in tools if not shutil.which(tool)), "")

    def __enter__(self) -> "SystemdHost":
        # --kill-child: killing the child directly gives a misleading error about "sigprocmask".
        namespaces = ("--pid", "--fork", "--kill-child", "--mount", "--uts", "--ipc", "--cgroup")
        command = ("unshare", *namespaces, "--propagation", "private", "bash", "-c", _BOOT, "boot")
        self._process = subprocess.Popen([*command, str(self._scratch)])
        children = Path(f"/proc/{self._process.pid}/task/{self._process.pid}/children")
        while not (pids := children.read_text().split()):
            time.sleep(0.01)
        self._init = int(pids[0])
        deadline = time.monotonic() + PATIENCE_S
        while self.run("systemctl is-system-running", check=False).stdout.strip() not in (
            "running",
            "degraded",
            "maintenance",
        ):
            assert time.monotonic() < deadline, "systemd does not come up"
            time.sleep(0.1)
        self._install()
        return self

    def __exit__(self, *_: object) -> None:
        assert self._process is not None
        ended = os.pidfd_open(self._init)
        self._process.kill()
        self._process.wait()
        select.select([ended], [], [], 60)
        os.close(ended)

    def run(
        self, script: str, *, check: bool = True, timeout_s: float = 120
    ) -> "subprocess.CompletedProcess[str]":
        """Run a bash script as root on that host."""
        done = subprocess.run(
            ["nsenter", "--target", str(self._init), "--all", "bash", "-s"],
            input=script,
            capture_output=True,
            text=True,
            timeout=timeout_s,
            check=False,
        )
        assert done.returncode == 0 or not check, (done.stdout, done.stderr)
        return done

    def client(self, words: str) -> str:
        """Run `worker-client WORDS` as the daemons' user; return what it prints."""
        user = "setpriv --reuid worker-daemon --regid worker-daemon --clear-groups"
        return self.run(f"cd /tmp && HOME=/tmp {user} {PREFIX}/bin/worker-client {words}").stdout

    def show(self, unit: str, field: str) -> str:
        """Return a property of a unit from systemctl show."""
        return self.run(f"systemctl show {unit} --property {field} --value").stdout.strip()

    def write(self, path: str, text: str) -> None:
        """Write a file there."""
        self.run(f"mkdir -p $(dirname {path})\ncat > {path} <<'END'\n{text}\nEND")

    def copy(self, source: Path, target: str) -> None:
        """Copy a directory of this machine there, readable by all users."""
        files = subprocess.run(["tar", "-c", "-C", source, "."], capture_output=True, check=True)
        unpack = f"mkdir -p {target} && tar -x -C {target} && chmod -R a+rX {target}"
        command = ("nsenter", "--target", str(self._init), "--all", "bash", "-c", unpack)
        subprocess.run(command, input=files.stdout, check=True)

    def _install(self) -> None:
        base, python = sys.base_prefix, Path(sys.executable).resolve().name
        self.run(f"mkdir -p /opt/python {PREFIX}/bin && mount --bind {base} /opt/python")
        # An environment may take packages from another one, so use this process's path.
        packages = os.pathsep.join(path for path in sys.path if path.endswith("-packages"))
        for name, module in (
            ("worker-daemon", "worker_daemon"),
            ("worker-client", "worker_client"),
        ):
            program = _PROGRAM.format(
                repository=REPOSITORY, packages=packages, python=python, module=module
            )
            self.write(f"{PREFIX}/bin/{name}", program)
        self.run(f"chmod 755 {PREFIX}/bin/*")
        self.run(
            f"""
            cd {UNITS}
            install -m 644 worker-daemon@.service worker-daemon.target /etc/systemd/system
            install -D -m 644 worker-daemon.sysusers /etc/sysusers.d/worker-daemon.conf
            install -D -m 644 worker-daemon.tmpfiles /etc/tmpfiles.d/worker-daemon.conf
            systemd-sysusers
            systemd-tmpfiles --create worker-daemon.conf
            systemctl daemon-reload
            """
        )

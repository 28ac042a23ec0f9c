"""Daemons that start quickly, for tests that do not check how a daemon starts."""

import subprocess
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from tests.support.forked_processes import ForkedPopen
from worker_client.launcher import LocalDaemons


class ForkedDaemons(LocalDaemons):
    """LocalDaemons that are forks (forked_processes.py), if all are on the CPU: CUDA's libraries
    read the environment when they are loaded."""

    def __init__(self, devices: Sequence[str], model_root: Path, **options: Any) -> None:
        start = ForkedPopen if set(devices) <= {"cpu"} else subprocess.Popen
        super().__init__(devices, model_root, start_process=start, **options)

"""Runs the kernels on the CPU under Triton's interpreter, in a separate process.

Triton reads TRITON_INTERPRET when it is imported; set in this process it would reach every other
test and every daemon they start.
"""

import os
import subprocess
import sys
from pathlib import Path

import pytest

HERE = Path(__file__).parent
ROOT = HERE.parents[2]


@pytest.mark.slow
@pytest.mark.timeout(800)
def test_interpreted() -> None:
    """All modules in one process: otherwise each would reload torch, Triton and transformers."""
    modules = sorted(str(path) for path in HERE.glob("interpreted_*.py"))
    assert modules
    environment = {key: value for key, value in os.environ.items() if "PYTEST" not in key}
    environment |= {"TRITON_INTERPRET": "1", "OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", *modules]
    done = subprocess.run(
        command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=780, check=False
    )
    assert done.returncode == 0, done.stdout + done.stderr

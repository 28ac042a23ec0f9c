"""A package with custom logits processors, installed for daemons by PYTHONPATH; and what its
processors do, in NumPy."""

from collections.abc import Sequence
from pathlib import Path

import numpy as np

MODULE = """
def make_even(vocab_size, device):
    def process(logits, positions):
        logits[:, 1::2] = float("-inf")
        return logits
    return process

def make_late(vocab_size, device):
    def process(logits, positions):
        logits[:, 7] += positions * 0.25
        return logits
    return process
"""
ENTRIES = """
[worker_daemon.logits_processors]
even = wd_test_processors:make_even
late = wd_test_processors:make_late
broken = wd_test_processors:nothing
"""
NAMES = ("late", "even")
"""Those that work."""


def install_processors(site: Path) -> None:
    """Write the package and its entry points to a new directory."""
    facts = site / "wd_test_processors-1.0.dist-info"
    facts.mkdir(parents=True)
    (site / "wd_test_processors.py").write_text(MODULE)
    (facts / "METADATA").write_text(
        "Metadata-Version: 2.1\nName: wd-test-processors\nVersion: 1.0\n"
    )
    (facts / "entry_points.txt").write_text(ENTRIES)


def apply_processors(names: Sequence[str], scores: np.ndarray, position: int) -> None:
    """Change a row's scores [V] in place; position: of the token to be sampled."""
    if "even" in names:
        scores[1::2] = -np.inf
    if "late" in names:
        scores[7] += position * 0.25

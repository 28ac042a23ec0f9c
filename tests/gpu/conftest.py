"""What the tests of one GPU share: a model's shape, to fill with made-up weights."""

import shutil
from pathlib import Path

import pytest

MODELS = Path(__file__).parents[2] / "benchmarks" / "models"


@pytest.fixture(scope="module")
def qwen3(tmp_path_factory):
    """A directory with the configuration of Qwen3-0.6B, alone under its root."""
    return shutil.copytree(MODELS / "qwen3-0.6b", tmp_path_factory.mktemp("models") / "qwen3")

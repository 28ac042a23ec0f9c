"""Shared by the tests on one GPU: checkpoints that they only read, and one cache of compiled
kernels for this process and for the daemons that tests start. Processes of pytest-xdist share the
GPU, and so do their daemons."""

import os
import shutil
import tempfile
from pathlib import Path

import pytest
import torch

from tests.support.gpu_generation import make_checkpoint
from worker_client.launcher import LocalDaemons

ROOT = Path(__file__).parents[2]
MODELS = ROOT / "benchmarks" / "models"
KERNEL_CACHE = ROOT / "build" / "test-kernels"


def pytest_configure() -> None:
    """Tests' daemons have their own cache directories, and would recompile every kernel."""
    if "TRITON_CACHE_DIR" not in os.environ:
        KERNEL_CACHE.mkdir(mode=0o700, parents=True, exist_ok=True)
        os.environ["TRITON_CACHE_DIR"] = str(KERNEL_CACHE)
    if "PYTEST_XDIST_WORKER" in os.environ:
        os.environ["WORKER_DAEMON_SHARE_GPU"] = "true"


@pytest.fixture(autouse=True)
def unused_memory_is_freed():
    """Tests of other processes may need the memory that this test's tensors had."""
    yield
    torch.cuda.empty_cache()


@pytest.fixture(scope="module")
def model_root():
    """The directory that a module's daemon may read models under."""
    path = Path(tempfile.mkdtemp(prefix="wd-models-"))
    yield path
    shutil.rmtree(path)


@pytest.fixture(scope="module")
def endpoints(model_root):
    """Of a daemon for the tests of a module."""
    with LocalDaemons(["cuda:0"], model_root) as daemons:
        yield daemons.endpoints


@pytest.fixture(scope="module")
def qwen3(tmp_path_factory):
    """A directory with the configuration of Qwen3-0.6B, alone under its root."""
    return shutil.copytree(MODELS / "qwen3-0.6b", tmp_path_factory.mktemp("models") / "qwen3")


@pytest.fixture(scope="session")
def llama(tmp_path_factory):
    """A random Llama in float32 (430 MB), alone under its root. Read it only."""
    return make_checkpoint(tmp_path_factory.mktemp("models") / "llama")

"""Real vLLM before real daemons. vLLM is this process's, its engine core too; the daemons run in
the environment that DAEMON_PYTHON names, and outlive each engine.

    with engine(path, pp=2, **options) as llm:      # a vllm.LLM on the daemons
        ...
    with ours(path, pp=2, **options) as (group, loaded):  # our own driver, on the same ones
"""

import contextlib
import gc
import os
import shutil
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path

os.environ |= {
    "DO_NOT_TRACK": "1",
    "HF_HUB_OFFLINE": "1",
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
    "VLLM_LOGGING_LEVEL": "WARNING",
    "VLLM_NO_USAGE_STATS": "1",
    "WORKER_DAEMON_ENDPOINTS": "ipc:///nowhere",  # chooses the platform; each engine names its own
}

import pytest

from tests.support.checkpoints import Checkpoint, make_checkpoint
from tests.support.serving import connect, worker_config
from worker_client.cli.demo_model import make_demo_model
from worker_client.launcher import LocalDaemons

NUM_DAEMONS = 2
BLOCK_SIZE = 16
MAX_MODEL_LEN = 160


def pytest_configure(config: pytest.Config) -> None:
    """vLLM warns of much, for good reasons of its own."""
    config.addinivalue_line("filterwarnings", "default")


@pytest.fixture(scope="session")
def model_root():
    """Directory of models and adapters."""
    path = Path(tempfile.mkdtemp(prefix="wd-models-"))
    yield path
    shutil.rmtree(path)


@pytest.fixture(scope="module")
def root(tmp_path_factory):
    """Directory of the demo's model, for tests that run a server."""
    root = tmp_path_factory.mktemp("models")
    make_demo_model(root / "demo")
    return root


@pytest.fixture(scope="session")
def endpoints(model_root):
    """Endpoints of NUM_DAEMONS daemons on the CPU."""
    python = os.environ.get("DAEMON_PYTHON", ".venv/bin/python")

    def command(endpoint: str, device: str, pipe: int) -> list[str]:
        words = [python, "-m", "worker_daemon", "serve", "--endpoint", endpoint, "--device", device]
        roots = ["--model-root", str(model_root), "--lora-root", str(model_root)]
        return [*words, *roots, "--exit-with-parent-fd", str(pipe)]

    with LocalDaemons(["cpu"] * NUM_DAEMONS, model_root, command=command) as daemons:
        yield daemons.endpoints


@pytest.fixture(scope="session")
def checkpoint(model_root):
    """checkpoint(architecture, **options) -> Checkpoint; equal calls give the same one."""
    made: dict[str, Checkpoint] = {}

    def get(architecture: str = "LlamaForCausalLM", **options: object) -> Checkpoint:
        key = repr((architecture, sorted(options.items())))
        if key not in made:
            made[key] = make_checkpoint(model_root, architecture, **options)
        return made[key]

    return get


@pytest.fixture(scope="session")
def ours(endpoints):
    """Our own driver on the first pp * tp daemons."""

    def serve(path: Path, pp: int = 1, tp: int = 1, **options: object):
        options = {"block_size": BLOCK_SIZE, "max_model_len": MAX_MODEL_LEN, **options}
        num_gpu_blocks = options.pop("num_gpu_blocks", 256)
        config = worker_config(path, pp, tp, **options)
        return connect(endpoints[: pp * tp], config, num_gpu_blocks=num_gpu_blocks)

    return serve


@pytest.fixture(scope="session")
def engine(endpoints, model_root):
    """A vllm.LLM on the first pp * tp daemons, or on others."""
    from vllm import LLM  # eight seconds

    @contextlib.contextmanager
    def serve(
        path: Path,
        pp: int = 1,
        tp: int = 1,
        settings: object = (),
        on: Sequence[str] = endpoints,
        **options: object,
    ) -> Iterator[LLM]:
        chosen = {
            "block_size": BLOCK_SIZE,
            "disable_log_stats": True,
            "dtype": "float32",
            "max_model_len": MAX_MODEL_LEN,
            "max_num_batched_tokens": 64,
            "max_num_seqs": 8,
            "num_gpu_blocks_override": 256,
            "skip_tokenizer_init": True,
            **options,
        }
        section = {"reload": True, "force": True, "lora_root": str(model_root), **dict(settings)}
        with pytest.MonkeyPatch.context() as patch:
            patch.setenv("WORKER_DAEMON_ENDPOINTS", ",".join(on[: pp * tp]))
            llm = LLM(
                str(path),
                pipeline_parallel_size=pp,
                tensor_parallel_size=tp,
                additional_config={"worker_daemon": section},
                **chosen,
            )
            try:
                yield llm
            finally:
                llm.llm_engine.engine_core.shutdown()
                del llm
                gc.collect()

    return serve

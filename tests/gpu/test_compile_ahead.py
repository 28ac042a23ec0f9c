"""A start with an empty kernel cache: the compile server compiles all kernels of the model, the
serving process none."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.whole_gpu,
    pytest.mark.timeout(600),
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]
ROOT = Path(__file__).parents[2]
START = """
import sys
from pathlib import Path
from triton import knobs
from benchmarks.stage_driver import StageDriver
from worker_daemon.kernel_compiler import KernelCompiler

compiled = []

def record(*, src, cache_hit, **_):
    if not cache_hit:
        compiled.append(src.name)

with KernelCompiler.start() as compiler:
    driver = StageDriver(Path(sys.argv[1]), "cuda:0", 4096, compiler=compiler)
    driver.load()
    knobs.compilation.listener = record
    driver.profile()
    driver.serve(1000)
    driver.leave()
print("compiled here:", sorted(compiled))
"""


def test_profile_and_warm_up_find_every_kernel_in_the_cache(tmp_path: Path) -> None:
    model = ROOT / "benchmarks" / "models" / "qwen3-0.6b"
    done = subprocess.run(
        [sys.executable, "-c", START, str(model)],
        cwd=ROOT,
        env=os.environ | {"TRITON_CACHE_DIR": str(tmp_path)},
        capture_output=True,
        text=True,
        timeout=500,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines()[-1] == "compiled here: []", done.stderr

"""A start with an empty kernel cache: the compile server compiles all kernels of the model and of
its draft model, the serving process none, neither until it serves nor in its first steps."""

import json
import os
import shutil
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
from benchmarks.stage_driver import StageDriver, wait
from rpc_schema.config import SpeculativeConfig
from worker_daemon.kernel_compiler import KernelCompiler

compiled = []

def record(*, src, cache_hit, **_):
    if not cache_hit:
        compiled.append(src.name)

with KernelCompiler.start() as compiler:
    speculative = SpeculativeConfig()
    if len(sys.argv) > 2:
        speculative = SpeculativeConfig(
            method="draft_model", num_speculative_tokens=3, model=sys.argv[2]
        )
    driver = StageDriver(
        Path(sys.argv[1]), "cuda:0", 4096, compiler=compiler, speculative=speculative
    )
    driver.load()
    knobs.compilation.listener = record
    driver.profile()
    driver.serve(1000)
    for num_requests, length in ((1, 3000), (3, 700), (70, 20)):
        driver.admit(num_requests, length, 32)
        for _ in range(3):
            wait(driver.worker.execute_model(driver.decode(num_requests), []))
    driver.leave()
print("compiled here:", sorted(compiled))
"""


@pytest.mark.parametrize("has_draft_model", [False, True])
def test_profile_and_warm_up_find_every_kernel_in_the_cache(
    tmp_path: Path, has_draft_model: bool
) -> None:
    source = ROOT / "benchmarks" / "models" / "qwen3-0.6b"
    models = [tmp_path / "target"]
    shutil.copytree(source, models[0])
    if has_draft_model:
        models.append(tmp_path / "draft")
        shutil.copytree(source, models[1])
        config = json.loads((source / "config.json").read_text())
        config |= {"hidden_size": 512, "intermediate_size": 1024, "num_hidden_layers": 4}
        config |= {"num_attention_heads": 6, "num_key_value_heads": 2, "head_dim": 64}
        (models[1] / "config.json").write_text(json.dumps(config))
    done = subprocess.run(
        [sys.executable, "-c", START, *map(str, models)],
        cwd=ROOT,
        env=os.environ | {"TRITON_CACHE_DIR": str(tmp_path / "kernels")},
        capture_output=True,
        text=True,
        timeout=500,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines()[-1] == "compiled here: []", done.stderr

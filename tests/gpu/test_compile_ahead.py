"""A start with an empty kernel cache: the compile server compiles all kernels of the model and of
its drafter, the serving process none, neither until it serves nor in its first steps."""

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
import msgspec
import numpy as np
from triton import knobs
from benchmarks.stage_driver import StageDriver, wait
from rpc_schema.config import SpeculativeConfig
from worker_daemon.kernel_compiler import KernelCompiler

compiled = []

def drafted(decode, num_requests):
    slots = np.arange(num_requests)
    tokens, drafts = (np.stack([slots, 0 * slots + n], 1).astype("<i4").tobytes() for n in (4, 3))
    return msgspec.structs.replace(
        decode,
        total_num_scheduled_tokens=4 * num_requests,
        num_scheduled_tokens=tokens,
        num_drafts=drafts,
    )

def record(*, src, cache_hit, **_):
    if not cache_hit:
        names = src.fn.arg_names
        values = {names[place[0]]: value for place, value in src.constants.items()}
        compiled.append(f"{src.name} {values}")

with KernelCompiler.start() as compiler:
    speculative = SpeculativeConfig()
    if len(sys.argv) > 2:
        speculative = SpeculativeConfig(
            method=sys.argv[2],
            num_speculative_tokens=3,
            model=sys.argv[3] if sys.argv[2] == "draft_model" else None,
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
        if len(sys.argv) > 2:
            step = drafted(driver.decode(num_requests), num_requests)
            wait(driver.worker.execute_model(step, []))
    driver.leave()
print("compiled here:", sorted(compiled))
"""


@pytest.mark.parametrize("method", ["none", "draft_model", "suffix"])
def test_profile_and_warm_up_find_every_kernel_in_the_cache(tmp_path: Path, method: str) -> None:
    source = ROOT / "benchmarks" / "models" / "qwen3-0.6b"
    target, draft = tmp_path / "target", tmp_path / "draft"
    shutil.copytree(source, target)
    drafter = [] if method == "none" else [method]
    if method == "draft_model":
        drafter.append(str(draft))
        shutil.copytree(source, draft)
        config = json.loads((source / "config.json").read_text())
        config |= {"hidden_size": 512, "intermediate_size": 1024, "num_hidden_layers": 4}
        config |= {"num_attention_heads": 6, "num_key_value_heads": 2, "head_dim": 64}
        (draft / "config.json").write_text(json.dumps(config))
    done = subprocess.run(
        [sys.executable, "-c", START, str(target), *drafter],
        cwd=ROOT,
        env=os.environ | {"TRITON_CACHE_DIR": str(tmp_path / "kernels")},
        capture_output=True,
        text=True,
        timeout=500,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines()[-1] == "compiled here: []", done.stderr

"""What a daemon on a GPU holds and shows before and while it serves: the lock on the GPU, no memory
of it while idle, its gauges, its steps' counts, and the GPU driver's recovery action."""

import os
import subprocess
import time

import pynvml
import pytest
import torch

from rpc_schema.config import ParallelConfig
from tests.support.command_line import ask_status, run_client, start_daemon, wait_for_daemons
from tests.support.gpu_generation import make_requests, worker_config
from tests.support.serving import connect, generate
from worker_daemon.device.fault_watch import RECOVERY_ACTION
from worker_daemon.device.nvml import CudaDevice, find_uuid
from worker_host.exit_codes import ExitCode

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.whole_gpu,
    pytest.mark.timeout(300),
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]


def test_gpu_has_one_daemon_whose_figures_are_shown(llama, tmp_path):
    locks = tmp_path / "locks"
    locks.mkdir()
    uuid = find_uuid(pynvml, CudaDevice("cuda:0", os.environ.get("CUDA_VISIBLE_DEVICES")))
    assert uuid.startswith(("GPU-", "MIG-"))
    options = (
        "--device",
        "cuda:0",
        "--model-root",
        str(llama.parent),
        "--gpu-lock-dir",
        str(locks),
    )
    endpoint = f"ipc://{tmp_path}/d/w"
    free = torch.cuda.mem_get_info()[0]
    process = start_daemon(tmp_path, "--endpoint", endpoint, *options)
    try:
        wait_for_daemons([endpoint], [process])
        assert free - torch.cuda.mem_get_info()[0] < 64 << 20  # no context before InitDevice
        assert (locks / f"worker-daemon-{uuid}.lock").read_text() == f"{process.pid}\n"
        second = start_daemon(tmp_path, "--endpoint", f"ipc://{tmp_path}/e/w", *options)
        assert second.wait(60) == ExitCode.IN_USE
        log = (tmp_path / "daemon.log").read_text()
        assert f"pid {process.pid} has the GPU {uuid}" in log
        config = worker_config(llama, ParallelConfig(), "bfloat16")
        with connect([endpoint], config, num_gpu_blocks=None) as (group, loaded):
            run = generate(group, loaded, make_requests(32, max_tokens=200))
            sampled = sum(len(tokens) for tokens in run.tokens.values())
            until = time.monotonic() + 10
            while (status := ask_status(endpoint, 2.0)) is None or status.gpu_load is None:
                assert time.monotonic() < until
            assert status.num_tokens >= sampled and status.usual_step_us > 0
            print(f"gauges: {status.gpu_load}")
            if not uuid.startswith("MIG-"):
                assert status.gpu_load.temperature_c > 0
                assert 0 <= status.gpu_load.utilization_percent <= 100
            frame = run_client(tmp_path, "top", "--once", "--endpoints", endpoint).stdout
            print(frame)
            assert "SERVING READY" in frame and "weights" in frame
    finally:
        process.kill()
        process.wait()


def test_driver_is_asked_what_the_gpu_needs():
    """On drivers that know the field; it shows that the field's number and type are right."""
    pynvml.nvmlInit()
    handle = pynvml.nvmlDeviceGetHandleByIndex(0)
    (field,) = pynvml.nvmlDeviceGetFieldValues(handle, [RECOVERY_ACTION])
    if field.nvmlReturn != pynvml.NVML_SUCCESS:
        pytest.skip(f"this driver does not tell (code {field.nvmlReturn})")
    assert field.value.uiVal == pynvml.NVML_GPU_RECOVERY_ACTION_NONE
    shown = subprocess.run(["nvidia-smi", "-q"], capture_output=True, text=True, check=True).stdout
    assert "Recovery Action" not in shown or "None" in shown.partition("Recovery Action")[2][:80]

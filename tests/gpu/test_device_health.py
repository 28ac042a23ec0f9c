"""Device health from a real GPU's NVML, with the calls that other tests replace."""

import pytest
import torch

from worker_daemon.device.health import no_check, open_health

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]


def test_health_of_a_real_device_can_be_asked_for():
    check = open_health(torch.device("cuda:0"))
    assert check is not no_check
    said = check()
    print(f"health: {said!r}")
    assert not said or said.startswith("the device is throttled: ")

"""Classification of exceptions about memory and the device."""

import pytest
import torch

from rpc_schema.errors import CapacityError, CommError, DeviceError, OutOfMemoryError
from worker_daemon.device.failures import (
    FailureKind,
    drop_scratch,
    failure_kind,
    out_of_memory,
    typed_device_error,
)

CUDA_OOM = (
    "CUDA out of memory. Tried to allocate 1.50 GiB. GPU 0 has a total capacity of 139.80 GiB of "
    "which 512.00 MiB is free. Process 1 has 1.00 GiB memory in use."
)


@pytest.mark.parametrize(
    ("error", "verdict"),
    [
        (torch.OutOfMemoryError(CUDA_OOM), FailureKind.OUT_OF_MEMORY),
        (torch.AcceleratorError("CUDA error: out of memory", 2), FailureKind.OUT_OF_MEMORY),
        (RuntimeError("Triton Error [CUDA]: out of memory"), FailureKind.OUT_OF_MEMORY),
        (
            RuntimeError("CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling"),
            FailureKind.OUT_OF_MEMORY,
        ),
        (MemoryError(), FailureKind.OUT_OF_MEMORY),
        (RuntimeError("std::bad_alloc"), FailureKind.OUT_OF_MEMORY),
        (torch.AcceleratorError("CUDA error: unspecified launch failure", 719), FailureKind.LOST),
        (torch.AcceleratorError("CUDA error: unknown error", 999), FailureKind.LOST),
        (torch.AcceleratorError("CUDA error: device-side assert triggered"), FailureKind.LOST),
        (
            RuntimeError("Triton Error [CUDA]: an illegal memory access was encountered"),
            FailureKind.LOST,
        ),
        (DeviceError("the driver says 214"), FailureKind.LOST),
        (torch.AcceleratorError("CUDA error: invalid argument", 1), FailureKind.OTHER),
        (
            torch.AcceleratorError("CUDA error: invalid configuration argument", 9),
            FailureKind.OTHER,
        ),
        (RuntimeError("mat1 and mat2 shapes cannot be multiplied"), FailureKind.OTHER),
        (CommError("out of memory at a peer"), FailureKind.OTHER),
        (KeyError("device-side assert triggered"), FailureKind.OTHER),
    ],
    ids=str,
)
def test_verdicts(error, verdict):
    assert failure_kind(error) is verdict
    typed = typed_device_error(error)
    assert isinstance(typed, OutOfMemoryError) == (verdict is FailureKind.OUT_OF_MEMORY)
    assert isinstance(typed, DeviceError) == (verdict is FailureKind.LOST)
    assert (typed is error) == (verdict is FailureKind.OTHER or isinstance(error, DeviceError))


def test_figures_of_a_gpu_are_those_of_its_message():
    typed = typed_device_error(torch.OutOfMemoryError(CUDA_OOM))
    assert (typed.needed_bytes, typed.free_bytes) == (3 << 29, 1 << 29)
    assert f"{3 << 29} bytes are needed, {1 << 29} bytes are free; fix: smaller steps" in str(typed)


def test_figures_of_the_host_are_measured():
    with pytest.raises(RuntimeError) as caught:
        torch.empty(1 << 50, dtype=torch.uint8)
    typed = out_of_memory(caught.value, "buy more", "no room")
    assert isinstance(typed, CapacityError)
    assert typed.needed_bytes == 1 << 50
    assert 0 < typed.free_bytes < 1 << 50
    assert str(typed).startswith("no room: ") and str(typed).endswith("fix: buy more")


def test_what_failed_frames_hold_is_freed():
    freed = []

    class Scratch:
        def __del__(self) -> None:
            freed.append(self)

    def inner() -> None:
        scratch = Scratch()
        raise MemoryError(str(scratch))

    def outer() -> None:
        scratch = Scratch()
        try:
            inner()
        except MemoryError as error:
            raise RuntimeError(str(scratch)) from error

    with pytest.raises(RuntimeError) as caught:
        outer()
    assert not freed
    drop_scratch(caught.value)
    assert len(freed) == 2

"""Location of a trainer's tensors in CUDA memory, for another process of this host to map: handles
of CUDA's driver, which are plain bytes (CUDA driver API, "Interprocess communication")."""

import ctypes
from collections.abc import Sequence
from ctypes import byref, c_size_t, c_ubyte, c_uint64, c_void_p

from torch import Tensor

from rpc_schema import weight_transfer as wt
from worker_client.errors import config_error

_LIBRARY = "libcuda.so.1"


class _CudaIpcHandle(ctypes.Structure):
    """CUipcMemHandle."""

    _fields_ = (("reserved", c_ubyte * 64),)


def locate(tensors: Sequence[Tensor]) -> wt.IpcSource:
    """Return the allocation and the offset of each tensor. Tensors must be contiguous, on a GPU,
    and complete there (synchronize first). They must live, unchanged, until update_weights returns.

    Raises:
        ClientConfigError: a tensor does not meet these conditions, or its memory cannot be shared.
    """
    driver = _driver()
    handles: dict[int, bytes] = {}
    places: list[tuple[int, int]] = []
    for tensor in tensors:
        if tensor.device.type != "cuda" or not tensor.is_contiguous():
            problem = "only contiguous tensors on a GPU can be shared"
            fix = "tensor.cuda().contiguous()"
            raise config_error("tensors", f"{list(tensor.shape)} on {tensor.device}", problem, fix)
        base, size = c_uint64(), c_size_t()
        _call(driver, "cuMemGetAddressRange_v2", byref(base), byref(size), tensor.data_ptr())
        if base.value not in handles:
            handle = _CudaIpcHandle()
            _call(driver, "cuIpcGetMemHandle", byref(handle), base.value)
            handles[base.value] = bytes(handle)
        places.append((base.value, tensor.data_ptr() - base.value))
    order = {base: number for number, base in enumerate(handles)}
    return wt.IpcSource(
        handles=tuple(handles.values()),
        blocks=tuple(order[base] for base, _ in places),
        offsets=tuple(offset for _, offset in places),
    )


def _driver() -> ctypes.CDLL:
    try:
        driver = ctypes.CDLL(_LIBRARY)
    except OSError as error:
        raise config_error("backend", "ipc", f"there is no CUDA driver: {error}", "gloo") from None
    driver.cuMemGetAddressRange_v2.argtypes = (c_void_p, c_void_p, c_uint64)
    driver.cuIpcGetMemHandle.argtypes = (c_void_p, c_uint64)
    return driver


def _call(driver: ctypes.CDLL, name: str, *arguments: object) -> None:
    code = getattr(driver, name)(*arguments)  # indexing would return a function without argtypes
    if code:
        fix = "allocate them without expandable_segments, or use nccl"
        raise config_error("tensors", name, f"{name}: CUDA error {code}", fix)

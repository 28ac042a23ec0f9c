"""What torch raises about a device, in our own words. Knows no step."""

import torch

from worker_daemon.errors import CapacityError, DeviceError


def typed_device_error(error: Exception) -> Exception:
    """Return CapacityError for memory that is not there, DeviceError for a device that is lost, and
    anything else as it is.

    An error of the device itself is sticky: every later call fails too, and only the process's end
    restores the device.
    """
    if isinstance(error, torch.OutOfMemoryError) or "can't allocate memory" in str(error):
        return CapacityError(f"out of memory: {error}", fix="smaller steps, or less of the memory")
    if isinstance(error, torch.AcceleratorError):
        return DeviceError(f"the device is lost: {error}")
    return error

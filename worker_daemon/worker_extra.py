"""Whether the extra `worker` is installed, without which the package is a driver's side alone.
Looks packages up and imports none."""

from importlib.util import find_spec
from typing import Final

from worker_daemon.errors import ConfigError

_MODULES: Final = ("torch", "safetensors", "uvloop", "pynvml")
"""What the extra brings for every device; Triton's kernels are for CUDA."""


def check_worker_extra() -> None:
    """Raise ConfigError where a package of the extra is missing."""
    missing = [name for name in _MODULES if find_spec(name) is None]
    if missing:
        raise ConfigError(
            f"the extra `worker` is not installed: no module {', '.join(missing)}",
            fix='pip install "worker-daemon[worker]"',
        )

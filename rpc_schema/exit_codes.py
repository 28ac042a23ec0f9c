"""The exit codes of a daemon, for whoever starts it again or asks what became of it.

64 to 78 are those of BSD's sysexits.h. Above 128 a signal ended the process, or asked twice for its
end.
"""

from collections.abc import Mapping
from enum import IntEnum
from types import MappingProxyType
from typing import Final


class ExitCode(IntEnum):
    """How a daemon ended."""

    OK = 0
    """It was told to end: a signal, its parent's pipe, a Shutdown."""
    BAD_DATA = 65
    """A checkpoint is missing, truncated or not what its config.json says."""
    INTERNAL = 70
    """An invariant of ours is broken."""
    IN_USE = 73
    """Another daemon has the endpoint or the GPU, or the endpoint's files are gone."""
    OUTPUT = 74
    """`worker-client` alone: output could not be written, or not all of it."""
    RETRY_LATER = 75
    """There is not enough room now (memory, disk, open files); later there may be."""
    KEY_REFUSED = 77
    """A key is not accepted."""
    CONFIG = 78
    """A setting is wrong."""
    CONTEXT_LOST = 86
    """The CUDA context is lost; a new process has a new one."""
    GPU_LOST = 87
    """The GPU is lost or needs a reset: do not start again on it before."""
    LINK_UNUSABLE = 88
    """A communicator hung again soon after it was made anew."""
    INTERRUPTED_TWICE = 130
    """A second signal came before the first was obeyed, this one SIGINT."""
    ABORTED = 134
    """SIGABRT: libraries of C++ give up by it, and systemd's watchdog."""
    KILLED = 137
    """SIGKILL: somebody's, or the kernel's for want of memory."""
    TERMINATED_TWICE = 143
    """A second signal came before the first was obeyed, this one SIGTERM."""


MEANINGS: Final[Mapping[ExitCode, str]] = MappingProxyType(
    {
        ExitCode.OK: "it was told to end",
        ExitCode.BAD_DATA: "a checkpoint is missing, truncated or not what its config.json says",
        ExitCode.INTERNAL: "an invariant of the daemon's is broken",
        ExitCode.IN_USE: "another daemon has the endpoint or the GPU, or its files are gone",
        ExitCode.OUTPUT: "output could not be written, or not all of it",
        ExitCode.RETRY_LATER: "there is not enough memory, disk or open files now",
        ExitCode.KEY_REFUSED: "a key is not accepted",
        ExitCode.CONFIG: "a setting is wrong",
        ExitCode.CONTEXT_LOST: "the CUDA context is lost",
        ExitCode.GPU_LOST: "the GPU is lost or needs a reset",
        ExitCode.LINK_UNUSABLE: "a communicator hung again soon after it was made anew",
        ExitCode.INTERRUPTED_TWICE: "a second SIGINT came",
        ExitCode.ABORTED: "it was aborted (SIGABRT)",
        ExitCode.KILLED: "it was killed (SIGKILL), perhaps by the kernel for want of memory",
        ExitCode.TERMINATED_TWICE: "a second SIGTERM came",
    }
)
"""Total over ExitCode."""

DO_NOT_RESTART: Final = frozenset((ExitCode.KEY_REFUSED, ExitCode.CONFIG, ExitCode.GPU_LOST))
"""Starting the daemon again as it was cannot help."""


def describe_exit(status: int) -> str:
    """Say what a process's exit status means; status is -N for signal N, as subprocess has it."""
    code = 128 - status if status < 0 else status
    known = MEANINGS.get(ExitCode(code)) if code in ExitCode.__members__.values() else None
    return f"exit code {code}" + (f": {known}" if known else "")

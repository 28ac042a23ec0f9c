"""The exit codes of a daemon, for supervisors and operators.

64 to 78 are those of BSD's sysexits.h. Above 128, a signal ended the process, or a second signal
came.
"""

from enum import IntEnum
from typing import Final, Self


class ExitCode(IntEnum):
    """Exit code of a daemon, with its meaning in a few words."""

    meaning: str

    def __new__(cls, code: int, meaning: str) -> Self:
        """Store the meaning with the number."""
        member = int.__new__(cls, code)
        member._value_, member.meaning = code, meaning
        return member

    OK = 0, "it was asked to exit"
    """It was asked to exit: by a signal, its parent's pipe, a Shutdown."""
    BAD_DATA = 65, "a checkpoint is missing, truncated or inconsistent with its config.json"
    """A checkpoint is missing, truncated or inconsistent with its config.json."""
    INTERNAL = 70, "an invariant of the daemon is broken"
    """An invariant of the daemon is broken."""
    IN_USE = 73, "another daemon has the endpoint or the GPU, or its files are gone"
    """Another daemon has the endpoint or the GPU, or the endpoint's files were removed."""
    OUTPUT = 74, "output could not be written, or not all of it"
    """`worker-client` alone: output could not be written, or only partly."""
    RETRY_LATER = 75, "there is not enough memory, disk or open files now"
    """A resource (memory, disk, open files) is exhausted now, but may be available later.
    `worker-client` also ends with it if the daemons are draining."""
    KEY_REFUSED = 77, "a key is not accepted"
    """A key is not accepted."""
    CONFIG = 78, "a setting is wrong"
    """A setting is wrong."""
    CONTEXT_LOST = 86, "the CUDA context is lost"
    """The CUDA context is lost; a new process has a new one."""
    GPU_LOST = 87, "the GPU is lost or needs a reset"
    """The GPU is lost or needs a reset: do not restart the daemon on it before that."""
    LINK_UNUSABLE = 88, "a communicator hung again soon after a relink"
    """A communicator hung again soon after a relink."""
    INTERRUPTED_TWICE = 130, "a second SIGINT came"
    """A second signal came before the first was handled, this one SIGINT."""
    ABORTED = 134, "it was aborted (SIGABRT)"
    """SIGABRT: from C++ libraries, or from systemd's watchdog."""
    KILLED = 137, "it was killed (SIGKILL), perhaps by the kernel for lack of memory"
    """SIGKILL: from a user, a process, or the OOM killer."""
    TERMINATED_TWICE = 143, "a second SIGTERM came"
    """A second signal came before the first was handled, this one SIGTERM."""


DO_NOT_RESTART: Final = frozenset((ExitCode.KEY_REFUSED, ExitCode.CONFIG, ExitCode.GPU_LOST))
"""Codes after which a restart with the same settings cannot help."""


def describe_exit(status: int) -> str:
    """Return the meaning of a process's exit status; status is -N for signal N, as in
    subprocess."""
    code = 128 - status if status < 0 else status
    known = [member.meaning for member in ExitCode if member == code]
    return ": ".join([f"exit code {code}", *known])

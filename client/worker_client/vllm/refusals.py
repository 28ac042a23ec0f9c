"""Why a server cannot have its daemons, in one line with vLLM's own options, and that line as the
last one of the server's output. The engine process knows the reason, but the server's process ends
after it, with a traceback that has none."""

import atexit
import multiprocessing
import os
import sys
import tempfile
from collections.abc import Mapping
from pathlib import Path
from types import MappingProxyType, TracebackType
from typing import Final

from rpc_schema.errors import WorkerDaemonError
from worker_client.errors import ClientError
from worker_client.vllm.settings import SECTION

REASON_VARIABLE: Final = "WORKER_CLIENT_REASON"
"""PID:FILE of the server's process and of the file for its engine process's reason."""


def _setting(name: str, value: str) -> str:
    """Return vLLM's option that sets one of our settings."""
    return f'--additional-config \'{{"{SECTION}": {{"{name}": {value}}}}}\''


_KEYS: Final = f"key_file and known_daemons in --additional-config '{{\"{SECTION}\": {{...}}}}'"
IN_VLLM: Final[Mapping[str, str]] = MappingProxyType(
    {
        "wait until it is free, or attach by force": "stop that driver, or take the daemons from "
        f"it: {_setting('force', 'true')}",
        "wait until the lease is free, or attach by force": "stop that driver, or take the daemons "
        f"from it: {_setting('force', 'true')}",
        "load again with reload=True (--reload)": f"load again: {_setting('reload', 'true')}",
        "(--wait SECONDS, attach(wait_s=SECONDS))": f"({_setting('wait_s', 'SECONDS')})",
        "--key-file and --known-daemons, a driver keys=Keys(...)": _KEYS,
        "both --key-file and --known-daemons": _KEYS,
        "--key-file and --known-daemons": _KEYS,
        "cache.kv_host_memory_bytes": "kv_offloading_size (each rank's kv_host_memory_bytes)",
        " (worker-client lora add NAME --replace)": "",
        "the file of --known-daemons": "the file of known_daemons",
        "the one in --known-daemons": "the one in known_daemons",
    }
)
"""Words of the driver library's errors that name options of worker-client or arguments of its
functions, and vLLM's words for them. Longer ones come before those that they contain."""


class DaemonsUnusable(ClientError):
    """A server cannot use its daemons. The message is one line."""


def unusable(error: WorkerDaemonError) -> DaemonsUnusable:
    """Return an error of the driver library in vLLM's words."""
    text = str(error).partition("\n")[0]  # the rest is a traceback
    for words, others in IN_VLLM.items():
        text = text.replace(words, others)
    return DaemonsUnusable(text)


def end_with_reason() -> None:
    """Have this process print its engine process's reason after an uncaught error. Does nothing in
    a process that multiprocessing has started, and where this was called before."""
    own = f"{os.getpid()}:"
    is_child = multiprocessing.parent_process() is not None
    if is_child or os.environ.get(REASON_VARIABLE, "").startswith(own):
        return
    handle, name = tempfile.mkstemp(prefix="worker-daemon-reason-")
    os.close(handle)
    os.environ[REASON_VARIABLE] = own + name
    atexit.register(Path(name).unlink, missing_ok=True)
    print_error = sys.excepthook

    def print_reason_last(
        kind: type[BaseException], error: BaseException, trace: TracebackType | None
    ) -> None:
        print_error(kind, error, trace)
        sys.stderr.write(Path(name).read_text())

    sys.excepthook = print_reason_last


def leave_reason(reason: WorkerDaemonError) -> None:
    """Leave the reason for the end of this engine process to the server's process that started
    it."""
    parent = multiprocessing.parent_process()
    pid, _, name = os.environ.get(REASON_VARIABLE, "").partition(":")
    if parent is not None and pid == str(parent.pid):
        Path(name).write_text(f"{reason}\n")

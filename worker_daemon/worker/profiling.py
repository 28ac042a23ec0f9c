"""Profiles of a worker's steps, for a driver or an observer: a trace of torch's profiler in a file,
or marks for an external CUDA profiler. Owns the running recording."""

import contextlib
import errno
import gzip
import logging
import re
import shutil
import tempfile
import threading
import time
from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import dataclass
from pathlib import Path
from typing import Final, Literal, TypeAlias

import numpy as np
import torch
from torch.autograd import profiler as autograd_profiler

from rpc_schema.errors import CapacityError, ConfigError, StateError
from rpc_schema.step import ExecuteDummyBatch, ExecuteModel, SampleTokens
from worker_daemon.directories import claim_directory
from worker_daemon.distributed.parallel_state import ParallelState
from worker_daemon.errors import config_error
from worker_daemon.raising import Translation

Kind: TypeAlias = Literal["torch", "cuda"]
Step: TypeAlias = ExecuteModel | SampleTokens | ExecuteDummyBatch

DEFAULT_PREFIX: Final = "trace"
OBSERVED_PREFIX: Final = "observed"
CLOCK_MARK: Final = "clock_"
"""Prefix of the name of an empty range; the rest is time.monotonic_ns() just before its start. A
trace has some at its start and end, which relate its timestamps to that clock."""
_NUM_CLOCK_MARKS: Final = 16
DISPOSAL_LIMIT_S: Final = 0.5
"""Limit on the wait, at the end of a profile, for the transfers of an abandoned link."""
_PREFIX: Final = re.compile(r"[A-Za-z0-9_][A-Za-z0-9._-]{0,63}")
_DISK_FULL: Final = (errno.ENOSPC, errno.EDQUOT)
_GZIP_LEVEL: Final = 1
_TAIL_BYTES: Final = 64
_NOTHING: Final = contextlib.nullcontext()

_LOG = logging.getLogger(__name__)


def trace_name(prefix: str, parallel: ParallelState) -> str:
    """Return the file name of a rank's trace."""
    suffix = f"pp{parallel.pp_rank}-tp{parallel.tp_rank}-rank{parallel.rank}"
    return f"{prefix}-{suffix}.json.gz"


def step_label(message: Step) -> str:
    """Return a step's label: its requests, tokens and seq. `context` counts requests with more than
    one token (prompts and chunks), `generation` the others. Never fails, for any message."""
    if isinstance(message, SampleTokens):
        return f"sample_tokens_of_{message.step_seq}_seq_{message.seq}"
    if isinstance(message, ExecuteDummyBatch):
        return f"dummy_batch_seq_{message.seq}"
    whole = len(message.num_scheduled_tokens) // 8 * 8
    counts = np.frombuffer(message.num_scheduled_tokens[:whole], "<i4")[1::2]
    prompts = counts[counts != 1]
    generations = int.from_bytes(message.scheduled, "little").bit_count() - prompts.size
    return (
        f"step_context_{prompts.size}({prompts.sum()})"
        f"_generation_{generations}({generations})_seq_{message.seq}"
    )


class _CudaMarks:
    """Calls cudaProfilerStart and cudaProfilerStop: an external profiler (nsys, ncu) records in
    between, and writes the trace."""

    kind: Kind = "cuda"

    def __init__(self) -> None:
        torch.cuda.profiler.start()  # type: ignore[no-untyped-call]  # torch's

    def step(self, message: Step) -> AbstractContextManager[object]:
        return torch.cuda.nvtx.range(step_label(message))

    def stop(self) -> Path | None:
        self.discard()
        return None

    def discard(self) -> None:
        torch.cuda.profiler.stop()  # type: ignore[no-untyped-call]  # torch's


class _TorchTrace:
    """Records the host operations of this thread and, on a GPU, the device's, in memory until
    stop().

    torch.profiler.profile wraps the same recorder, but its start imports the compiler.
    """

    kind: Kind = "torch"

    def __init__(self, device: torch.device, target: Path) -> None:
        self._target = target
        use_device = "cuda" if device.type == "cuda" else None
        self._profile = autograd_profiler.profile(use_device=use_device, use_kineto=True)
        self._profile.__enter__()  # type: ignore[no-untyped-call]  # torch's
        _mark_clock()

    def step(self, message: Step) -> AbstractContextManager[object]:
        return autograd_profiler.record_function(step_label(message))

    def discard(self) -> None:
        self._profile.__exit__(None, None, None)  # type: ignore[no-untyped-call]  # torch's

    def stop(self) -> Path | None:
        return self.write().pack()

    def write(self) -> "PlainTrace":
        """End the recording; return its uncompressed file. Raises as PlainTrace.pack."""
        _mark_clock()
        self.discard()
        with _writing(self._target), contextlib.ExitStack() as on_error:
            scratch = Path(tempfile.mkdtemp(prefix=".", dir=self._target.parent))
            on_error.callback(shutil.rmtree, scratch, ignore_errors=True)
            plain = scratch / "trace.json"
            self._profile.export_chrome_trace(str(plain))  # type: ignore[no-untyped-call]  # torch's
            _check_complete(plain)
            on_error.pop_all()
        return PlainTrace(plain, self._target)


_Recording: TypeAlias = _CudaMarks | _TorchTrace


class PlainTrace:
    """A trace that was written but not compressed. Call pack() or discard() once, on any thread."""

    def __init__(self, plain: Path, target: Path) -> None:
        """plain: a file in its own directory."""
        self._plain = plain
        self._target = target

    def pack(self) -> Path:
        """Compress it and move it to its final path; a file of that name is replaced.

        Raises:
            CapacityError: the disk is full.
            ConfigError: the file cannot be written. After either of these the trace is lost.
        """
        packed = self._plain.with_name("trace.json.gz")
        try:
            with _writing(self._target):
                with self._plain.open("rb") as source, gzip.open(packed, "wb", _GZIP_LEVEL) as sink:
                    shutil.copyfileobj(source, sink, 1 << 20)
                packed.replace(self._target)
        finally:
            self.discard()
        return self._target

    def discard(self) -> None:
        """Delete it."""
        shutil.rmtree(self._plain.parent, ignore_errors=True)


def _mark_clock() -> None:
    """Write clock marks. The time is read before each range, so the next mark bounds its end."""
    for _ in range(_NUM_CLOCK_MARKS):
        with autograd_profiler.record_function(f"{CLOCK_MARK}{time.monotonic_ns()}"):
            pass


@dataclass(frozen=True, slots=True)
class ProfileRequest:
    """The kind of a profile, and the name of its trace."""

    kind: Kind
    prefix: str
    """Prefix of the file's name; empty: that of the profile before."""


class Profiler:
    """Owned by the worker and used on the step thread alone; records at most one profile at a time.
    stop() or end() frees the recorded events."""

    def __init__(self, directory: Path | None, settle: Callable[[], None] = lambda: None) -> None:
        """directory: for traces; made when the first one starts. None: kind torch is refused.
        settle: waits for the transfers in progress, if the neighbors are alive. torch writes a
        transfer's end into the recording in which it began, and crashes if that was freed."""
        self._directory = directory
        self._prefix = DEFAULT_PREFIX
        self.recording: _Recording | None = None
        """The running profile or trace."""
        self.abandoned: _Recording | None = None
        """The recording of a driver that was replaced."""
        self._observed: _TorchTrace | None = None
        """The running recording, if it is an observer's."""
        self._settle = settle
        self._disposal: threading.Thread | None = None
        """Thread that ends with the last transfers of an abandoned link."""

    @property
    def is_recording(self) -> bool:
        """True if a profile or a trace runs."""
        return self.recording is not None

    def start(self, request: ProfileRequest, device: torch.device, parallel: ParallelState) -> None:
        """Begin to record.

        Raises:
            StateError: a profile runs already.
            ConfigError: the prefix is not a plain name, there is no usable directory for traces, or
                the device has no profiler of this kind.
        """
        self._refuse_second()
        prefix = _checked_prefix(request.prefix or self._prefix)
        self._need_no_abandoned()
        if request.kind == "cuda":
            if device.type != "cuda":
                raise config_error("kind", "cuda", "the device is not a CUDA device", "use torch")
            self.recording = _CudaMarks()
        else:
            target = self._claimed_directory() / trace_name(prefix, parallel)
            self.recording = _TorchTrace(device, target)
        self._prefix = prefix

    def stop(self, kind: Kind) -> Path | None:
        """End the profile; return the trace's file, which replaces one of the same name. Without a
        profile: warns, and returns None.

        Raises:
            StateError: a profile of the other kind runs.
            CapacityError: the disk is full.
            ConfigError: the file cannot be written. After the last two, the profile is over and its
                trace lost.
        """
        recording = self.recording
        if recording is None or self._observed is not None:
            _LOG.warning("no profile runs: there is nothing to stop")
            return None
        if recording.kind != kind:
            problem = "a profile of another kind runs"
            raise StateError(problem, field="kind", value=kind, fix=f"stop kind {recording.kind}")
        return self._stop()

    def start_observed(self, device: torch.device, parallel: ParallelState) -> None:
        """Begin to record for an observer: as start() does, but no driver's stop or end ends it.
        Raises as start() does."""
        self._refuse_second()
        target = self._claimed_directory() / trace_name(OBSERVED_PREFIX, parallel)
        self._need_no_abandoned()
        self.recording = self._observed = _TorchTrace(device, target)

    def stop_observed(self, *, keep: bool) -> PlainTrace | None:
        """End the observer's recording; return the trace if it is to be kept.

        Raises:
            StateError: nothing is recorded for an observer.
            CapacityError, ConfigError: as stop().
        """
        observed = self._observed
        if observed is None:
            problem = "no observer's trace is recorded: a reset of the worker ends it"
            raise StateError(problem, fix="start one, and stop it before the reset")
        self._settle()
        self.recording = self._observed = None
        if keep:
            return observed.write()
        observed.discard()
        return None

    def end(self) -> None:
        """End any recording, and keep its trace if it can be written: before a reset, and at the
        end."""
        if self._disposal is not None:
            self._disposal.join(DISPOSAL_LIMIT_S)
        self._drop_abandoned()
        kind = self.recording and self.recording.kind
        if self._disposal is not None and kind is not None:
            _LOG.warning("the trace of the profile that was running is lost with its link")
            self.abandoned, self.recording, self._observed = self.recording, None, None
            return
        try:
            written = self._stop()
        except Exception as error:  # must not prevent a reset
            _LOG.warning("the trace of the profile that was running is lost: %s", error)
        else:
            if kind is not None:
                _LOG.info("ended the profile that was running: %s", written or kind)

    def abandon(self) -> None:
        """Mark a replaced driver's recording to be dropped before the next step or profile.
        Dropping it now would wait for the device, whose kernels may wait for a peer until the link
        is left."""
        if self.recording is not None and self._observed is None:
            self.abandoned, self.recording = self.recording, None

    def step(self, message: Step) -> AbstractContextManager[object]:
        """Return the context to run a step in, which labels the step in the profile."""
        if self.abandoned is not None:
            self._drop_abandoned()
        return _NOTHING if self.recording is None else self.recording.step(message)

    def link_left(self, disposal: threading.Thread | None) -> None:
        """Record that a link was left, whose last transfers end with `disposal`: the recording in
        which they began must outlive them."""
        self._disposal = disposal

    def _need_no_abandoned(self) -> None:
        self._drop_abandoned()
        if self.abandoned is not None:
            problem = "the profile of a replaced driver has not ended yet"
            fix = "start again once the last transfers of the broken link have timed out"
            raise StateError(problem, field="action", value="start", fix=fix)

    def _drop_abandoned(self) -> None:
        if self._disposal is not None:
            if self._disposal.is_alive():
                return
            self._disposal = None
        self._settle()
        abandoned, self.abandoned = self.abandoned, None
        if abandoned is None:
            return
        try:
            abandoned.discard()
        except Exception:
            _LOG.warning("a profile did not end cleanly", exc_info=True)

    def _stop(self) -> Path | None:
        self._settle()
        recording, self.recording = self.recording, None
        self._observed = None
        return None if recording is None else recording.stop()

    def _refuse_second(self) -> None:
        if self.recording is None:
            return
        whose = "a profile" if self._observed is None else "an observer's trace"
        raise StateError(
            f"{whose} of kind {self.recording.kind} runs already",
            field="action",
            value="start",
            fix="stop it first" if self._observed is None else "start again once that has ended",
        )

    def _claimed_directory(self) -> Path:
        if self._directory is None:
            problem = "there is no directory for traces"
            raise ConfigError(problem, field="profile-dir", fix="give the daemon --profile-dir")
        return claim_directory(self._directory, "traces", "profile-dir")


def _checked_prefix(prefix: str) -> str:
    if not _PREFIX.fullmatch(prefix):
        fix = "use up to 64 letters, digits, '.', '_' and '-', the first no '.' or '-'"
        raise config_error("prefix", prefix, "a trace has a name, not a path", fix)
    return prefix


def _check_complete(trace: Path) -> None:
    """Raise OSError unless the file exists and ends as JSON does: the profiler's writer does not
    report a full disk."""
    if not trace.exists():
        raise OSError(errno.ENOSPC, "the trace was not written")
    with trace.open("rb") as file:
        file.seek(max(0, trace.stat().st_size - _TAIL_BYTES))
        if not file.read().rstrip().endswith(b"}"):
            raise OSError(errno.ENOSPC, "the trace is incomplete")


def _writing(target: Path) -> Translation:
    def translate(error: Exception) -> CapacityError | ConfigError:
        assert isinstance(error, OSError)
        if error.errno in _DISK_FULL:
            problem = f"the disk of {target.parent} is full"
            return CapacityError(problem, fix="free space, or profile fewer steps")
        problem = f"the trace cannot be written: {error.strerror}"
        fix = "give --profile-dir with a directory that this user may write"
        return config_error("profile-dir", str(target.parent), problem, fix)

    return Translation((OSError,), translate)

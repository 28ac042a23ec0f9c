"""`python -m tests.support.traced_serve FILE ARGS`: the daemon's real command line, which writes
call traces to FILE as JSON: the project's calls, as [file, function], from a step message to its
reply, without those inside the forward pass, which a CUDA graph replaces. "plain" is the last
steady decode, "drafted" the steady step with drafts that calls the most, "inputs" that part of it
which comes before the forward pass.
"""

import json
import sys
import threading
from pathlib import Path

import pytest

from rpc_schema.step import ExecuteModel
from worker_daemon.cli import app
from worker_daemon.server import step_thread

ROOT = Path(__file__).parents[2]
PACKAGES = ("rpc_schema/", "worker_daemon/")
STEP = ("worker_daemon/server/step_thread.py", "_take")
"""The step thread's part of a trace ends as this function returns."""
FORWARD = ("worker_daemon/runner/stage_program.py", "run")
COMPLETION = "completion"
"""Name of the other thread that is traced."""


class StepTracer:
    """Traces the step thread from where it decodes a message, and the completion thread."""

    def __init__(self, file: Path) -> None:
        self._file = file
        self._decode = step_thread.decode_step
        self._calls: list[tuple[str, str]] = []
        self._num_before_forward = 0
        self._columns: tuple[bytes, ...] = ()
        self._kind = ""
        self._in_forward = False
        self._traces: dict[str, list[tuple[str, str]]] = {"plain": [], "drafted": [], "inputs": []}

    def decode_step(self, frames):
        """Replace the step thread's decode_step."""
        self._keep()
        self._calls, self._kind = [STEP], ""
        sys.setprofile(self._stepped)
        message = self._decode(frames)
        if isinstance(message, ExecuteModel):
            rows = message.scheduled, message.num_scheduled_tokens
            columns = (*rows, message.num_drafts, message.new_block_slots)
            changes = message.scheduled_new_reqs or message.finished
            if not changes and columns == self._columns:
                self._kind = "drafted" if message.num_drafts else "plain"
            self._columns = columns
        return message

    def _keep(self) -> None:
        """Keep the trace of the last step, if it was steady."""
        before = len(self._traces.get(self._kind, ()))
        if not self._kind or (self._kind == "drafted" and len(self._calls) < before):
            return
        self._traces[self._kind] = self._calls
        if self._kind == "drafted":
            self._traces["inputs"] = self._calls[: self._num_before_forward]
        self._file.write_text(json.dumps(self._traces))

    def started(self, frame, event, argument) -> None:
        """Be the first profile function of every thread."""
        is_traced = threading.current_thread().name == COMPLETION
        sys.setprofile(self._completed if is_traced else None)

    def _completed(self, frame, event, argument) -> None:
        call = _call(frame)
        if event == "call" and call is not None:
            self._calls.append(call)

    def _stepped(self, frame, event, argument) -> None:
        call = _call(frame)
        if call is None or event not in ("call", "return"):
            return
        if call == FORWARD:
            self._in_forward = event == "call"
            if self._in_forward:
                self._num_before_forward = len(self._calls)
        elif event == "call" and not self._in_forward:
            self._calls.append(call)
        elif event == "return" and call == STEP:
            sys.setprofile(None)


def _call(frame) -> tuple[str, str] | None:
    name = frame.f_code.co_filename.removeprefix(f"{ROOT}/")
    return (name, frame.f_code.co_name) if name.startswith(PACKAGES) else None


def main() -> None:
    """Serve."""
    tracer = StepTracer(Path(sys.argv.pop(1)))
    threading.setprofile(tracer.started)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(step_thread, "decode_step", tracer.decode_step)
        app()


if __name__ == "__main__":
    main()

"""`python -m tests.support.traced_serve FILE ARGS`: the daemon's real command line, which writes
the call trace of each steady decode to FILE as JSON: the project's calls, as [file, function], from
the step message to the first operation of the model."""

import json
import sys
from pathlib import Path

import pytest

from rpc_schema.step import ExecuteModel
from worker_daemon.cli import app
from worker_daemon.server import step_thread

ROOT = Path(__file__).parents[2]
PACKAGES = ("rpc_schema/", "worker_daemon/")
LOOP = "worker_daemon/server/step_thread.py"
MODEL = "worker_daemon/models/"
"""The first call into one of these files ends a trace."""


class StepTracer:
    """Traces from the point where the step loop decodes a message."""

    def __init__(self, file: Path) -> None:
        self._file = file
        self._decode = step_thread.decode_step
        self._calls: list[tuple[str, str]] = []
        self._scheduled = b""
        self._is_steady = False

    def __call__(self, frames):
        """Replace decode_step."""
        self._calls, self._is_steady = [(LOOP, "_take")], False
        sys.setprofile(self._called)
        message = self._decode(frames)
        if isinstance(message, ExecuteModel):
            changes = message.num_scheduled_tokens or message.scheduled_new_reqs or message.finished
            self._is_steady = not changes and message.scheduled == self._scheduled
            self._scheduled = message.scheduled
        return message

    def _called(self, frame, event, argument) -> None:
        if event != "call":
            return
        name = frame.f_code.co_filename.removeprefix(f"{ROOT}/")
        if name.startswith(MODEL):
            sys.setprofile(None)
            if self._is_steady:
                self._file.write_text(json.dumps(self._calls))
        elif name.startswith(PACKAGES):
            self._calls.append((name, frame.f_code.co_name))


def main() -> None:
    """Serve."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(step_thread, "decode_step", StepTracer(Path(sys.argv.pop(1))))
        app()


if __name__ == "__main__":
    main()

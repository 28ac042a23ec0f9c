"""The result lines of `worker-client generate`: in input order, in a file as soon as all before
them are there, so that whoever comes after a run that was cut off need not do them again. Knows no
daemon."""

import json
import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TextIO

from client.adoption import AdoptedRequest
from client.cli.report import JsonObject, output_line
from client.cli.session import InputRequest
from client.errors import ClientConfigError
from client.requests import GenerationRequest
from client.scheduler import RequestOutput
from client.tokenizer import Tokenizer


class Results:
    """What has come of each request so far. To be used by `with`, which ends the file."""

    def __init__(
        self,
        req_ids: Sequence[str],
        tokenizer: Tokenizer | None,
        kept: Mapping[str, JsonObject],
        path: Path | None,
    ) -> None:
        """kept: lines that there are already. path: None writes nowhere."""
        self._req_ids = req_ids
        self._tokenizer = tokenizer
        self._lines = dict(kept)
        self._path = path
        self._file: TextIO | None = None
        self._num_written = 0

    def __enter__(self) -> "Results":
        if self._path is None:
            return self
        # Not over the lines of a run before, which a kill in between would take along.
        renewed = self._path.is_file()
        path = self._path.with_name(f"{self._path.name}.part") if renewed else self._path
        self._file = path.open("w", encoding="utf-8")
        self._write()
        if renewed:
            os.fsync(self._file.fileno())
            path.replace(self._path)
        return self

    def __exit__(self, *_: object) -> None:
        if self._file is not None:
            self._file.close()

    def take(self, req_id: str, outcome: RequestOutput | str) -> None:
        """A request has ended: its output, or what is wrong with it."""
        self._lines[req_id] = output_line(req_id, outcome, self._tokenizer)
        self._write()

    def finish(self) -> list[JsonObject]:
        """Return all lines; of a request that has not ended, one that says so."""
        for req_id in self._req_ids:
            if req_id not in self._lines:
                self.take(req_id, "was not finished")
        return [self._lines[req_id] for req_id in self._req_ids]

    def _write(self) -> None:
        if self._file is None:
            return
        while self._num_written < len(self._req_ids):
            line = self._lines.get(self._req_ids[self._num_written])
            if line is None:
                break
            self._file.write(json.dumps(line) + "\n")
            self._num_written += 1
        self._file.flush()


def read_finished(path: Path | None) -> dict[str, JsonObject]:
    """Return the lines of an earlier run's output that hold tokens, by id; a line that was cut off
    is none."""
    if path is None or not path.is_file():
        return {}
    found: dict[str, JsonObject] = {}
    for text in path.read_text(encoding="utf-8", errors="replace").split("\n"):
        try:
            line = json.loads(text)
        except ValueError:
            continue
        if isinstance(line, dict) and isinstance(line.get("token_ids"), list):
            found[str(line.get("id"))] = line
    return found


def with_adopted(
    inputs: Sequence[InputRequest], adopted: Sequence[AdoptedRequest]
) -> list[InputRequest]:
    """Return the input's requests, then those that run without being in it.

    Raises:
        ClientConfigError: a request runs under the id of another one of the input.
    """
    running = {request.req_id: request for request in adopted}
    for entry in inputs:
        if entry.request is not None and entry.id in running:
            _check_same_prompt(entry.request, running.pop(entry.id))
    strangers = [
        InputRequest(name, GenerationRequest(name, request.token_ids[: request.num_prompt_tokens]))
        for name, request in running.items()
    ]
    return [*inputs, *strangers]


def _check_same_prompt(request: GenerationRequest, running: AdoptedRequest) -> None:
    prompt = running.token_ids[: running.num_prompt_tokens].tolist()
    if request.prompt_token_ids.tolist() != prompt:
        raise ClientConfigError(
            "a request of this id is running with another prompt",
            field="id",
            value=request.id,
            fix="give the input that it came from, or run without --adopt, which drops it",
        )

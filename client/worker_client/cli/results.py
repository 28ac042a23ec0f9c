"""The result lines of `worker-client generate`, in input order. Each is written as soon as all
earlier ones are, so that --adopt need not repeat the work of an interrupted run."""

import json
from collections.abc import Mapping, Sequence
from pathlib import Path

import numpy as np

from rpc_schema.extensions import extension_of
from rpc_schema.prompt_embeds import PromptEmbeds
from worker_client.cli.output_file import STANDARD_OUTPUT, OutputFile, part_of, write_whole
from worker_client.cli.report import JsonObject, output_line
from worker_client.cli.session import InputRequest
from worker_client.errors import config_error
from worker_client.group.adoption import AdoptedRequest
from worker_client.inputs.tokenizer import Tokenizer
from worker_client.requests import GenerationRequest
from worker_client.scheduler import RequestOutput


class Results:
    """Results of the requests so far. A context manager, which closes the file."""

    def __init__(
        self,
        req_ids: Sequence[str],
        tokenizer: Tokenizer | None,
        kept: Mapping[str, JsonObject],
        path: Path | None,
    ) -> None:
        """kept: lines of the run that is continued. path: None writes no file."""
        self._req_ids = list(req_ids)
        self._order = [*kept, *(req_id for req_id in req_ids if req_id not in kept)]
        """Order of the file until the end: kept lines come first, so that they are always in the
        file."""
        self._tokenizer = tokenizer
        self._lines = dict(kept)
        self._path = path
        self._file: OutputFile | None = None
        self._num_written = 0

    def __enter__(self) -> "Results":
        if self._path is not None:
            self._file = OutputFile(self._path, self._next_lines())
        return self

    def __exit__(self, *_: object) -> None:
        if self._file is not None:
            self._file.close()

    def take(self, req_id: str, outcome: RequestOutput | str) -> None:
        """Record the end of a request: its output, or its error. Raises OutputError."""
        self._lines[req_id] = output_line(req_id, outcome, self._tokenizer)
        if self._file is not None:
            self._file.write(self._next_lines())

    def finish(self) -> list[JsonObject]:
        """Write and return all lines; a request without a result gets an error line. Raises
        OutputError."""
        for req_id in self._req_ids:
            if req_id not in self._lines:
                self.take(req_id, "was not finished")
        lines = [self._lines[req_id] for req_id in self._req_ids]
        if self._file is not None and self._path is not None:
            self._file.finish()
            self._file.close()
            self._file = None
            if self._order != self._req_ids:
                write_whole(self._path, map(json.dumps, lines))
        return lines

    def _next_lines(self) -> list[str]:
        """Return the lines that can be written now: no earlier line is missing."""
        texts: list[str] = []
        while self._num_written < len(self._order):
            line = self._lines.get(self._order[self._num_written])
            if line is None:
                break
            texts.append(json.dumps(line))
            self._num_written += 1
        return texts


def read_finished(path: Path | None) -> dict[str, JsonObject]:
    """Return the finished requests' lines of an earlier run, by id; ignores a partial line."""
    if path is None or path == STANDARD_OUTPUT:
        return {}
    part = part_of(path)
    source = part if part.is_file() else path
    if not source.is_file():
        return {}
    found: dict[str, JsonObject] = {}
    for text in source.read_text(encoding="utf-8", errors="replace").split("\n"):
        try:
            line = json.loads(text)
        except ValueError:
            continue
        if isinstance(line, dict) and isinstance(line.get("token_ids", line.get("pooled")), list):
            found[str(line.get("id"))] = line
    return found


def with_adopted(
    inputs: Sequence[InputRequest], adopted: Sequence[AdoptedRequest]
) -> list[InputRequest]:
    """Return the input's requests, then running requests that are not in the input.

    Raises:
        ClientConfigError: a running request has the id of a different request in the input.
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
    embeds = extension_of(running.extensions, PromptEmbeds)
    if np.asarray(request.prompt).tolist() != prompt or request.embeds_extension() != embeds:
        problem = "a request of this id is running with another prompt"
        fix = "give the input that it came from, or drop it by running without --adopt"
        raise config_error("id", request.id, problem, fix)

"""`worker-client generate` and `worker-client bench`."""

import json
import sys
from collections.abc import Collection, Sequence
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console

from client.adoption import AdoptedRequest
from client.cli import options as opt
from client.cli.daemons import Scrape
from client.cli.report import JsonObject, bench_object, output_lines
from client.cli.results import Results, read_finished, with_adopted
from client.cli.session import InputRequest, Session, open_session, read_inputs, read_lines
from client.errors import ClientConfigError
from client.worker_group import Progress

AsJson = Annotated[bool, typer.Option("--json", help="One JSON object on standard output.")]
Profile = Annotated[
    str, typer.Option(metavar="NAME", help="Write a trace NAME-ppP-tpT-rankR.json.gz of each rank.")
]
Scraped = Annotated[
    bool, typer.Option("--scrape", help="Ask each daemon for its status 10 times a second.")
]

_DEFAULT_MAX_TOKENS = 64


@opt.takes_run_options
def generate(
    run: opt.RunOptions,
    config: opt.ConfigFile = None,
    prompt: opt.Prompts = None,
    input_: opt.Input = None,
    output: opt.Output = None,
    max_tokens: opt.MaxTokens = _DEFAULT_MAX_TOKENS,
    adopt: opt.Adopt = False,
) -> None:
    """Generate for prompts or for a file of requests."""
    if adopt:
        _check_adoption(run)
    lines = _input_lines(prompt or [], input_, max_tokens, may_be_none=adopt)
    with open_session(run, _ProgressPrinter(), keep_requests=adopt) as session:
        inputs = read_inputs(lines, session.tokenizer, run.seed)
        finished = read_finished(output) if adopt else {}
        adopted = _adopted(session, finished) if adopt else []
        inputs = with_adopted(inputs, adopted)
        left = [entry for entry in inputs if entry.id not in finished]
        names = dict.fromkeys([entry.id for entry in inputs] + list(finished))
        with Results(list(names), session.tokenizer, finished, output) as collected:
            served = session.serve(left, adopted, collected.take)
            results = collected.finish()
    if output is None:
        _print_texts(results)
    for req_id, error in served.errors.items():
        Console(stderr=True).print(f"{req_id}: {error}", markup=False, highlight=False)
    if results and len(served.errors) == len(results):
        raise typer.Exit(1)


@opt.takes_run_options
def bench(
    run: opt.RunOptions,
    config: opt.ConfigFile = None,
    prompt: opt.Prompts = None,
    input_: opt.Input = None,
    output: opt.Output = None,
    max_tokens: opt.MaxTokens = _DEFAULT_MAX_TOKENS,
    as_json: AsJson = False,
    profile: Profile = "",
    scrape: Scraped = False,
) -> None:
    """Generate, and measure it."""
    lines = _input_lines(prompt or [], input_, max_tokens)
    with open_session(run, _ProgressPrinter()) as session:
        inputs = read_inputs(lines, session.tokenizer, run.seed)
        result, results = _measure(session, inputs, profile, scrape)
    if output is not None:
        _write_lines(output, results)
    if as_json:
        sys.stdout.write(json.dumps(result) + "\n")
    else:
        Console().print_json(json.dumps(result))


def _measure(
    session: Session, inputs: Sequence[InputRequest], profile: str, scraped: bool
) -> tuple[JsonObject, list[JsonObject]]:
    daemons = [client.endpoint.control for client in session.group.clients]
    with Scrape(daemons if scraped else (), session.options.keys) as scrape:
        served, traces = (
            session.serve_profiled(inputs, profile) if profile else (session.serve(inputs), [])
        )
    result = bench_object(served, session.group.get_status())
    result["statuses_scraped"] = scrape.num_statuses
    if profile:
        result["traces"] = traces
    return result, output_lines(inputs, served, session.tokenizer)


def _check_adoption(run: opt.RunOptions) -> None:
    if not run.endpoints or run.reload:
        raise ClientConfigError(
            "only running daemons have requests to adopt, and loading anew drops them",
            field="adopt",
            value=True,
            fix="give --endpoints, and no --reload",
        )


def _adopted(session: Session, finished: Collection[str]) -> list[AdoptedRequest]:
    """The requests that run; not those whose results are there."""
    adopted = session.group.adopt_requests()
    Console(stderr=True).print(f"{len(adopted)} requests are running", highlight=False)
    return [request for request in adopted if request.req_id not in finished]


def _input_lines(
    prompts: Sequence[str], path: Path | None, max_tokens: int, *, may_be_none: bool = False
) -> list[str]:
    if may_be_none and not prompts and path is None:
        return []
    if bool(prompts) == (path is not None):
        raise ClientConfigError(
            "there is nothing to generate for, or two sources of it",
            field="input",
            value=None if path is None else str(path),
            fix="give either --prompt or --input",
        )
    if path is None:
        return [json.dumps({"prompt": text, "max_tokens": max_tokens}) for text in prompts]
    if not path.exists() or path.is_dir():
        raise ClientConfigError(
            "no such file", field="input", value=str(path), fix="name a JSONL file"
        )
    return read_lines(path)


def _print_texts(results: Sequence[JsonObject]) -> None:
    for result in results:
        if "error" not in result:
            sys.stdout.write(f"{result['id']}: {result.get('text', result['token_ids'])}\n")


def _write_lines(path: Path, results: Sequence[JsonObject]) -> None:
    with path.open("w", encoding="utf-8") as file:
        file.writelines(json.dumps(result) + "\n" for result in results)


class _ProgressPrinter:
    """Prints each phase of each rank once, to standard error, between-times left out. Not the
    operation: a heartbeat may be older than the one that is under way."""

    def __init__(self) -> None:
        self._console = Console(stderr=True)
        self._seen: set[tuple[int, str]] = set()

    def __call__(self, progress: Progress) -> None:
        key = (progress.rank, progress.phase)
        if progress.phase != "IDLE" and key not in self._seen:
            self._seen.add(key)
            self._console.print(
                f"rank {progress.rank}: {progress.phase}", markup=False, highlight=False
            )

"""`worker-client generate` and `worker-client bench`."""

import json
import math
import sys
from collections.abc import Callable, Collection, Mapping, Sequence
from pathlib import Path
from typing import Annotated

import typer

from worker_client.cli.arrivals import check_request_rate, with_arrivals
from worker_client.cli.bench_table import bench_table
from worker_client.cli.daemons import Scrape
from worker_client.cli.input_adapters import with_hub_adapters
from worker_client.cli.output_file import check_output, print_text, write_whole
from worker_client.cli.replica_run import Served
from worker_client.cli.report import JsonObject, bench_object, output_line, output_lines
from worker_client.cli.results import Results, read_finished, with_adopted
from worker_client.cli.run_options import RunOptions, takes_run_options
from worker_client.cli.session import (
    InputRequest,
    Session,
    open_session,
    read_inputs,
    read_lines,
)
from worker_client.cli.terminal import print_lines
from worker_client.errors import config_error
from worker_client.group.adoption import AdoptedRequest
from worker_client.group.expert_loads import loads_by_layer
from worker_client.inputs.tokenizer import TextBounds, Tokenizer, load_tokenizer
from worker_client.worker_group import RankProgress, WorkerGroup, parse_endpoints
from worker_host.plain_text import printable

AsJson = Annotated[
    bool, typer.Option("--json", help="One JSON object in a line, not a table on a terminal.")
]
RequestRate = Annotated[
    float,
    typer.Option(
        metavar="R", help="Requests arrive at random, R a second on average; inf: all at once."
    ),
]
Profile = Annotated[
    str | None,
    typer.Option(metavar="NAME", help="Write a trace NAME-ppP-tpT-rankR.json.gz of each rank."),
]
Scraped = Annotated[
    bool, typer.Option("--scrape", help="Ask each daemon for its status 10 times a second.")
]
Adopt = Annotated[
    bool, typer.Option("--adopt", help="Continue the requests that a previous driver has left.")
]


@takes_run_options
def generate(run: RunOptions, adopt: Adopt = False) -> None:
    """Generate for prompts or for a file of requests."""
    if adopt:
        _check_adoption(run)
    tokenizer, inputs = read_requests(run, may_be_none=adopt)
    run, inputs = with_hub_adapters(run, inputs)
    if not adopt:
        end_if_all_are_wrong(inputs, run.output)
    with open_session(run, print_progress(), keep_requests=adopt, tokenizer=tokenizer) as session:
        finished = read_finished(run.output) if adopt else {}
        adopted = _adopted(session, finished) if adopt else []
        inputs = with_adopted(inputs, adopted)
        left = [entry for entry in inputs if entry.id not in finished]
        report_cuts(left, session.max_model_len)
        names = dict.fromkeys([entry.id for entry in inputs] + list(finished))
        with Results(list(names), tokenizer, finished, run.output) as collected:
            served = session.serve(left, adopted, collected.take)
            results = collected.finish()
    if run.output is None:
        _print_texts(results)
    report_errors(inputs, served.errors, len(results))


@takes_run_options
def bench(
    run: RunOptions,
    request_rate: RequestRate = math.inf,
    as_json: AsJson = False,
    profile: Profile = None,
    scrape: Scraped = False,
) -> None:
    """Generate and measure. The figures are a table on a terminal, elsewhere a JSON object, which
    bench-compare reads."""
    check_request_rate(request_rate)
    tokenizer, lines = read_requests(run)
    run, lines = with_hub_adapters(run, lines)
    inputs = with_arrivals(lines, request_rate, run.plan.seed or 0)
    end_if_all_are_wrong(inputs, run.output)
    with open_session(run, print_progress(), tokenizer=tokenizer) as session:
        report_cuts(inputs, session.max_model_len)
        served, result = _measure(session, inputs, profile, scrape, request_rate)
    if as_json or not sys.stdout.isatty():
        print_text(json.dumps(result, indent=None if as_json else 2) + "\n")
    else:
        print_lines(bench_table(result))
    if run.output is not None:
        write_whole(run.output, map(json.dumps, output_lines(inputs, served, tokenizer)))
    report_errors(inputs, served.errors, len(inputs))


def _measure(
    session: Session,
    inputs: Sequence[InputRequest],
    profile: str | None,
    scraped: bool,
    request_rate: float,
) -> tuple[Served, JsonObject]:
    group = session.group
    daemons = [client.endpoint.control for own in group.replicas for client in own.clients]
    before = group.get_status()
    with Scrape(daemons if scraped else (), session.options.plan.keys) as scrape:
        if profile is not None:
            served, traces = session.serve_profiled(inputs, profile)
        else:
            served, traces = session.serve(inputs, measured=True), []
    after = [each for own in group.on_whole(WorkerGroup.get_status) for each in own]
    ranks = {status.rank for status in after}  # without those of lost replicas
    loads_before = loads_by_layer([status for status in before if status.rank in ranks])
    result = bench_object(served, after, loads_before, request_rate)
    result["statuses_scraped"] = scrape.num_statuses
    if profile is not None:
        result["traces"] = traces
    return served, result


def read_requests(
    run: RunOptions, *, may_be_none: bool = False
) -> tuple[Tokenizer | None, list[InputRequest]]:
    """Check everything that can be checked before anything is loaded."""
    lines = _input_lines(run, may_be_none=may_be_none)
    plan = run.plan
    if plan.endpoints:
        parallel = plan.config.parallel
        parse_endpoints(plan.endpoints, parallel, plan.keys, parallel.data_parallel_size)
    if run.output is not None:
        check_output(run.output)
    tokenizer = load_tokenizer(plan.model.directory, TextBounds(plan.max_text_bytes))
    directory = None if run.input is None else run.input.parent
    inputs = read_inputs(lines, tokenizer, plan.seed, directory)
    if tokenizer is not None:
        tokenizer.close()  # from here on it only decodes
    return tokenizer, inputs


def end_if_all_are_wrong(inputs: Sequence[InputRequest], output: Path | None) -> None:
    """Exit before anything is loaded if no line of the input can be served."""
    if not inputs or any(entry.request is not None for entry in inputs):
        return
    errors = {entry.id: entry.error for entry in inputs}
    if output is not None:
        lines = [output_line(name, error, None) for name, error in errors.items()]
        write_whole(output, map(json.dumps, lines))
    report_errors(inputs, errors, len(errors))


def _check_adoption(run: RunOptions) -> None:
    if not run.plan.endpoints or run.plan.reload:
        problem = "only running daemons have requests to adopt, and loading again drops them"
        raise config_error("adopt", True, problem, "give --endpoints, and no --reload")


def _adopted(session: Session, finished: Collection[str]) -> list[AdoptedRequest]:
    """Return the running requests, without those that have results."""
    adopted = session.adopt_requests()
    sys.stderr.write(f"{len(adopted)} requests are running\n")
    return [request for request in adopted if request.req_id not in finished]


def _input_lines(run: RunOptions, *, may_be_none: bool) -> Sequence[str | bytes]:
    if may_be_none and not run.prompts and run.input is None:
        return []
    if bool(run.prompts) == (run.input is not None):
        problem = "there is nothing to generate for, or two sources of it"
        fix = "give either --prompt or --input"
        raise config_error("input", None if run.input is None else str(run.input), problem, fix)
    if run.input is None:
        return [json.dumps({"prompt": p, "max_tokens": run.max_tokens}) for p in run.prompts]
    if not run.input.exists() or run.input.is_dir():
        raise config_error("input", str(run.input), "no such file", "name a JSONL file")
    return read_lines(run.input)


def _print_texts(results: Sequence[JsonObject]) -> None:
    is_terminal = sys.stdout.isatty()
    for result in results:
        if "error" not in result:
            text = str(result.get("text", result.get("token_ids", result.get("pooled"))))
            shown = _for_terminal(text) if is_terminal else text
            print_text(f"{printable(str(result['id']))}: {shown}\n")


def _for_terminal(text: str) -> str:
    return "".join(c if c in "\n\t" else printable(c) for c in text)


def report_errors(
    inputs: Sequence[InputRequest], errors: Mapping[str, str], num_requests: int
) -> None:
    """Print a line for each request that failed, to standard error; exit with 1 if all have."""
    names = {entry.id: entry.shown_as for entry in inputs}
    for req_id, error in errors.items():
        sys.stderr.write(f"{printable(names.get(req_id, req_id))}: {printable(error)}\n")
    if errors and len(errors) == num_requests:
        raise typer.Exit(1)


def report_cuts(inputs: Sequence[InputRequest], max_model_len: int) -> None:
    """Print one line, to standard error, if requests ask for more tokens than fit after their
    prompts: they get fewer."""
    cut = [
        (entry.shown_as, request.max_tokens, room)
        for entry in inputs
        if (request := entry.request) is not None
        and request.pooling is None
        and 0 < (room := max_model_len - len(request.prompt)) < request.max_tokens
    ]
    if cut:
        name, asked, room = cut[0]
        in_all = f"; requests cut in all: {len(cut)}" if len(cut) > 1 else ""
        sys.stderr.write(
            f"{printable(name)}: max_tokens = {asked} is cut to {room}, which max_model_len = "
            f"{max_model_len} leaves after the prompt{in_all}\n"
        )


def print_progress() -> Callable[[RankProgress], None]:
    """Return a function that prints each phase of each rank once, to standard error, except idle
    ones. It omits the operation's name: a heartbeat may be older than the current operation."""
    seen: set[tuple[int, str]] = set()

    def show(progress: RankProgress) -> None:
        key = (progress.rank, progress.phase)
        if progress.phase != "IDLE" and key not in seen:
            seen.add(key)
            sys.stderr.write(f"rank {progress.rank}: {progress.phase}\n")

    return show

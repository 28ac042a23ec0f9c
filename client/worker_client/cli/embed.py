"""`worker-client embed`: outputs computed from hidden states, for prompts or a file of requests."""

import io
import json
from collections.abc import Mapping, Sequence
from dataclasses import replace
from enum import StrEnum
from typing import Annotated, get_args

import numpy as np
import typer
from numpy.typing import NDArray

from rpc_schema.pooling import PoolingParams, PoolingTask
from worker_client.cli.input_adapters import with_hub_adapters
from worker_client.cli.options import one_of
from worker_client.cli.output_file import check_writable, print_text, replacement
from worker_client.cli.replica_run import Served
from worker_client.cli.report import JsonObject
from worker_client.cli.results import Results
from worker_client.cli.run import end_if_all_are_wrong, print_progress, read_requests, report_errors
from worker_client.cli.run_options import RunOptions, takes_run_options
from worker_client.cli.session import InputRequest, open_session
from worker_client.errors import RequestError, config_error
from worker_client.inputs.request_checks import validated
from worker_client.inputs.request_fields import flat


class Format(StrEnum):
    """Forms of the outputs."""

    JSONL = "jsonl"
    NPY = "npy"
    RAW = "raw"


Task = Annotated[str, typer.Option(help=", ".join(get_args(PoolingTask)))]
Dimensions = Annotated[
    int, typer.Option(min=0, help="Leading values to keep of each embedding; 0: all.")
]
Activation = Annotated[
    bool | None,
    typer.Option(
        "--activation/--no-activation",
        help="Normalize embeddings, give scores as probabilities; default: as the model says.",
    ),
]
As = Annotated[
    Format,
    typer.Option(
        "--format", help="jsonl: a line a request; npy, raw: one float32 array in --output."
    ),
]


@takes_run_options
def embed(
    run: RunOptions,
    task: Task = "embed",
    dimensions: Dimensions = 0,
    activation: Activation = None,
    form: As = Format.JSONL,
) -> None:
    """Embed or classify prompts, or the requests of a file."""
    params = PoolingParams(
        task=one_of("task", task, PoolingTask), use_activation=activation, dimensions=dimensions
    )
    if form is not Format.JSONL and run.output is None:
        fix = "give --output, or --format jsonl"
        raise config_error("format", form.value, "it needs a file", fix)
    if form is not Format.JSONL and run.output is not None:
        check_writable(run.output)
    tokenizer, lines = read_requests(run)
    run, lines = with_hub_adapters(run, lines)
    inputs = [_pooling(entry, params) for entry in lines]
    end_if_all_are_wrong(inputs, run.output if form is Format.JSONL else None)
    as_lines = run.output if form is Format.JSONL else None
    names = [entry.id for entry in inputs]
    with (
        open_session(run, print_progress()) as session,
        Results(names, tokenizer, {}, as_lines) as collected,
    ):
        served = session.serve(inputs, (), collected.take)
        results = collected.finish()
    if form is not Format.JSONL and run.output is not None:
        array = _array(inputs, served, form)
        with replacement(run.output) as file:
            file.write(array)
        print_text("".join(f"{json.dumps(_shape(result))}\n" for result in results))
    elif run.output is None:
        print_text("".join(f"{json.dumps(result)}\n" for result in results))
    report_errors(inputs, served.errors, len(results))


def _pooling(entry: InputRequest, params: PoolingParams) -> InputRequest:
    """Return a line's request, with these parameters unless it has its own."""
    if entry.request is None or entry.request.pooling is not None:
        return entry
    request = replace(entry.request, pooling=params)
    try:
        return replace(entry, request=validated(request))
    except RequestError as error:
        return InputRequest(entry.id, None, flat(error).reason, entry.line)


def _array(inputs: Sequence[InputRequest], served: Served, form: Format) -> bytes:
    """Return the rows of all outputs, in the order of the input, as one float32 array."""
    rows = [np.atleast_2d(values) for values in _outputs(inputs, served).values()]
    widths = {own.shape[1] for own in rows}
    if len(widths) > 1:
        fix = "give --format jsonl, or all requests the same task and dimensions"
        raise config_error("format", form.value, "the outputs differ in width", fix)
    whole = np.concatenate(rows) if rows else np.zeros((0, 0), np.float32)
    if form is Format.RAW:
        return whole.astype("<f4").tobytes()
    file = io.BytesIO()
    np.save(file, whole.astype("<f4"), allow_pickle=False)
    return file.getvalue()


def _outputs(inputs: Sequence[InputRequest], served: Served) -> Mapping[str, NDArray[np.float32]]:
    found = {entry.id: served.outputs.get(entry.id) for entry in inputs}
    return {
        req_id: output.pooled
        for req_id, output in found.items()
        if output is not None and output.pooled is not None
    }


def _shape(result: JsonObject) -> JsonObject:
    """Return a request's line without its values, which are in the array."""
    values = result.get("pooled")
    if not isinstance(values, list):
        return result
    is_matrix = isinstance(values[0], list)
    rows, width = (len(values), len(values[0])) if is_matrix else (1, len(values))
    return {**{k: v for k, v in result.items() if k != "pooled"}, "rows": rows, "width": width}

"""Output of generate and bench: lines for requests, and the bench object. Pure functions of a
run."""

import math
from collections.abc import Mapping, Sequence
from typing import Final, TypeAlias

import msgspec
import numpy as np

from rpc_schema.lifecycle import Status
from worker_client.cli.expert_loads import (
    LoadFigures,
    RankFigures,
    load_figures,
    num_expert_ranks,
    rank_figures,
)
from worker_client.cli.replica_run import Served
from worker_client.cli.session import InputRequest, versions
from worker_client.group.expert_loads import LoadsByLayer, loads_by_layer, loads_since
from worker_client.inputs.text_stream import final_text
from worker_client.inputs.tokenizer import Tokenizer
from worker_client.requests import parent_id
from worker_client.scheduler import RequestOutput
from worker_client.scheduler_output import Logprobs
from worker_client.tracing.run_times import StepTiming
from worker_host.draft_counts import DraftCounts

JsonValue: TypeAlias = "int | float | str | Sequence[JsonValue] | Mapping[str, JsonValue] | None"
JsonObject: TypeAlias = dict[str, JsonValue]

PERCENTILES: Final = (50, 90, 99)


def output_lines(
    inputs: Sequence[InputRequest], served: Served, tokenizer: Tokenizer | None
) -> list[JsonObject]:
    """Return one object for each request, in input order."""
    outcomes: dict[str, RequestOutput | str] = {**served.outputs, **served.errors}
    return [
        output_line(entry.id, outcomes.get(entry.id, "was not finished"), tokenizer)
        for entry in inputs
    ]


def output_line(
    req_id: str, output: RequestOutput | str, tokenizer: Tokenizer | None
) -> JsonObject:
    """Return the object for a request's output or error."""
    if isinstance(output, str):
        return {"id": req_id, "error": output}
    line: JsonObject = {"id": req_id}
    if output.pooled is not None:
        line["pooled"] = output.pooled.tolist()
    else:
        line["token_ids"] = output.token_ids
    if output.index is not None:
        line |= {"request": parent_id(req_id), "index": output.index}
    if output.text is not None:
        line["text"] = output.text
    elif output.pooled is None and tokenizer is not None:
        line["text"] = final_text(tokenizer, output)
    line["finish_reason"] = output.finish_reason
    if output.error:
        line["error"] = output.error
    line["num_prompt_tokens"] = output.num_prompt_tokens
    line["num_cached_tokens"] = output.num_cached_tokens
    if output.num_loaded_tokens:
        line["num_loaded_tokens"] = output.num_loaded_tokens
    if output.num_drafted:
        line |= {"num_drafted": output.num_drafted, "num_accepted": output.num_accepted}
    return line | _reports(output)


def _reports(output: RequestOutput) -> JsonObject:
    """Return what an output reports besides its tokens."""
    line: JsonObject = {}
    if output.logprobs is not None:
        line["logprobs"] = [_logprobs(entry_) for entry_ in output.logprobs]
    if output.full_logprobs is not None:
        line["full_logprobs"] = [both._asdict() for both in output.full_logprobs]
    if output.routed_experts is not None:
        line["routed_experts"] = output.routed_experts.tolist()
    if output.token_id_logprobs is not None:
        line["token_id_logprobs"] = [own.tolist() for own in output.token_id_logprobs]
    if output.prompt_logprobs is not None:
        line["prompt_logprobs"] = [
            None if entry_ is None else _logprobs(entry_) for entry_ in output.prompt_logprobs
        ]
    return line


def _logprobs(logprobs: Logprobs) -> JsonObject:
    return {
        "token_id": int(logprobs.token_ids[0]),
        "logprob": float(logprobs.logprobs[0]),
        "rank": logprobs.rank,
        "top_token_ids": logprobs.token_ids[1:].tolist(),
        "top_logprobs": logprobs.logprobs[1:].tolist(),
    }


def bench_object(
    served: Served, daemons: Sequence[Status], loads_before: LoadsByLayer, request_rate: float
) -> JsonObject:
    """Return the object that bench prints; gpu_memory_bytes is summed over the daemons.
    loads_before: the expert loads before the run; request_rate: inf if all requests came at
    once."""
    loads = loads_since(loads_before, loads_by_layer(daemons))
    figures, num_ranks = load_figures(loads), num_expert_ranks(daemons[0])
    of_ranks = rank_figures(loads, num_ranks) if num_ranks > 1 else None
    memory = [status.memory_bytes for status in daemons]
    outputs = list(served.outputs.values())
    tokens_in = sum(output.num_prompt_tokens for output in outputs)
    tokens_out = sum(len(output.token_ids) for output in outputs)
    seconds = max(served.seconds, 1e-9)
    uses = {
        use: sum(entry.get(use, 0) for entry in memory) for use in (memory[0] if memory else ())
    }
    config = daemons[0].config
    return {
        "model": None if config is None else config.model.model,
        "requests": len(outputs),
        "failed": len(served.errors),
        "request_rate": None if math.isinf(request_rate) else request_rate,
        "seconds": served.seconds,
        "tokens_in": tokens_in,
        "tokens_out": tokens_out,
        "req_s": len(outputs) / seconds,
        "out_tok_s": tokens_out / seconds,
        "total_tok_s": (tokens_in + tokens_out) / seconds,
        "ttft_ms": percentiles(_ttft_ms(served)),
        "tpot_ms": percentiles(_tpot_ms(served, outputs)),
        "itl_ms": percentiles([gap * 1e3 for gap in served.token_gaps_s]),
        "step_ms": step_times(served.records),
        "startup_s": served.startup_s,
        "gpu_memory_bytes": uses,
        "reply_delay": [msgspec.structs.asdict(status.reply_delay) for status in daemons],
        "input_wait_share": [status.input_wait_share for status in daemons],
        **({} if figures is None else {"experts": _known(figures) | _known(of_ranks)}),
        **draft_figures(served.drafts),
        "providers": daemons[0].providers,
        "device": daemons[0].device,
        "versions": versions(),
    }


def _known(figures: LoadFigures | RankFigures | None) -> JsonObject:
    return {} if figures is None else figures._asdict()


def draft_figures(counts: DraftCounts) -> JsonObject:
    """Return how many drafts steps have verified, and how many were accepted, in all and by place;
    nothing if there were none. mean_length: tokens that a request gained by a step with drafts."""
    drafted, accepted, verified = counts.num_drafted, counts.num_accepted, counts.num_verified
    if not drafted:
        return {}
    figures: JsonObject = {
        "drafted": drafted,
        "accepted": accepted,
        "acceptance": accepted / drafted,
        "mean_length": 1 + accepted / verified,
        "acceptance_by_place": [count / verified for count in counts.accepted_by_place],
    }
    return {"drafts": figures}


def percentiles(values: Sequence[float]) -> JsonObject:
    """Return the mean and PERCENTILES; None without values."""
    names = ["mean", *(f"p{percent}" for percent in PERCENTILES)]
    if not values:
        return dict.fromkeys(names)
    figures = [np.mean(values), *np.percentile(values, PERCENTILES)]
    return dict(zip(names, map(float, figures), strict=True))


def step_times(records: Sequence[StepTiming]) -> dict[str, JsonObject]:
    """Return count, mean and percentiles of step times in ms, by kind of step, from result to
    result."""
    by_kind: dict[str, list[float]] = {}
    for record in sorted(records, key=lambda record: record.kind):
        by_kind.setdefault(record.kind, []).append(record.interval_s * 1e3)
    return {
        kind: {
            "count": len(times),
            "p10": float(np.percentile(times, 10)),
            **percentiles(times),
        }
        for kind, times in by_kind.items()
    }


def _ttft_ms(served: Served) -> list[float]:
    timings = served.timings.values()
    return [(timing.first_token - timing.added) * 1e3 for timing in timings]


def _tpot_ms(served: Served, outputs: Sequence[RequestOutput]) -> list[float]:
    times = []
    for output in outputs:
        timing, num = served.timings[output.req_id], len(output.token_ids)
        if num > 1:
            times.append((timing.finished - timing.first_token) * 1e3 / (num - 1))
    return times

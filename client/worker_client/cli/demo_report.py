"""Lines that `worker-client demo` shows of its runs: charts of tokens per second, recoveries, and
whether the tokens are the same. Pure."""

import hashlib
from collections.abc import Iterator, Mapping, Sequence
from itertools import zip_longest
from math import ceil
from typing import Final

import msgspec

from worker_client.cli.demo_run import Recovery, Run
from worker_client.cli.terminal_lines import Line, bars

WIDTH: Final = 79
HEIGHT: Final = 3
"""Lines of a chart's bars."""
NUM_PHASES: Final = 3
"""Longest phases of a recovery that are named."""
_NAMES: Final = {"wait": "successor's start", "warm_up": "warm-up"}
"""Phases of a replacement that have another name here."""
_LABEL: Final = 7
_COLUMNS: Final = WIDTH - _LABEL - 2
_TICKS_S: Final = (0.1, 0.2, 0.5, 1, 2, 5, 10, 20, 30, 60, 120, 300, 600)
"""Distances of the marks of a time axis."""


def charts(runs: Sequence[Run], now: float) -> list[Line]:
    """Return a chart of each run that has begun, on the same scales, and their time axis. now: of
    time.monotonic(), for the last one, which may still run."""
    begun = [run for run in runs if run.began is not None]
    longest_s = max((_shown_s(run, now) for run in begun), default=0.0)
    column_s = max(longest_s, 1.0) / _COLUMNS
    rates = [_rates(run, column_s) for run in begun]
    top = max((rate for own in rates for rate in own), default=0.0)
    lines: list[Line] = []
    for run, own in zip(begun, rates, strict=True):
        lines += [Line(_title(run), "bold"), *_chart(run, own, top, column_s)]
    return [*lines, Line(_time_axis(column_s))] if begun else []


def _shown_s(run: Run, now: float) -> float:
    assert run.began is not None
    recovery = run.recovery
    is_waiting = recovery is not None and recovery.token_at is None
    return max(run.seconds, now - run.began if is_waiting else 0.0)


def _rates(run: Run, column_s: float) -> list[float]:
    """Return the tokens per second of each column."""
    assert run.began is not None
    counts = [0] * _COLUMNS
    for sampled in run.tokens:
        counts[min(_COLUMNS - 1, int((sampled.at - run.began) / column_s))] += sampled.num_tokens
    return [count / column_s for count in counts]


def _title(run: Run) -> str:
    recovery = run.recovery
    if recovery is None or run.began is None:
        return f"{run.title}: {run.num_tokens:,} tokens in {run.seconds:.1f} s"
    total_s = recovery.total_s
    later = "..." if total_s is None else f"{total_s:.2f} s later"
    return f"{run.title} at {recovery.at - run.began:.1f} s, next token {later}"


def _chart(run: Run, rates: Sequence[float], top: float, column_s: float) -> Iterator[Line]:
    labels = (f"{top:,.0f}", *[""] * (HEIGHT - 1))
    for label, row in zip(labels, bars(rates, top, HEIGHT), strict=True):
        yield Line(f"{label:>{_LABEL}} {'┤' if label else '│'}{row.rstrip()}", "green")
    base = ["─"] * _COLUMNS
    if run.recovery is not None and run.began is not None:
        base[min(_COLUMNS - 1, int((run.recovery.at - run.began) / column_s))] = "▲"
    yield Line(f"{'0':>{_LABEL}} └{''.join(base)}")


def _time_axis(column_s: float) -> str:
    tick_s = next((tick for tick in _TICKS_S if tick / column_s >= 10), _TICKS_S[-1])
    axis = [" "] * (_COLUMNS + _LABEL + 2)
    for number in range(ceil(_COLUMNS * column_s / tick_s)):
        mark = f"{number * tick_s:g} s"
        place = _LABEL + 2 + round(number * tick_s / column_s)
        if place + len(mark) <= WIDTH:
            axis[place : place + len(mark)] = mark
    return "".join(axis).rstrip()


def recoveries(runs: Sequence[Run]) -> Iterator[Line]:
    """Yield what each recovery took, with its longest phases, and what was kept."""
    yield Line("seconds from SIGKILL to the next token", "bold")
    for recovery in (run.recovery for run in runs):
        if recovery is not None and recovery.total_s is not None:
            longest = sorted(recovery.seconds, key=lambda phase: -recovery.seconds[phase])
            phases = [each for each in recovery.seconds if each in longest[:NUM_PHASES]]
            named = ", ".join(
                f"{_NAMES.get(phase, phase)} {recovery.seconds[phase]:.2f}" for phase in phases
            )
            yield Line(f"{recovery.total_s:6.2f}  {recovery.victim}: {named}")
            yield Line(f"{'':<6}  {_kept(recovery)}")


def _kept(recovery: Recovery) -> str:
    if recovery.num_adopted is None:
        return "the driver went on, and computed the running requests again"
    begun = f"adopted {recovery.num_adopted} requests with their KV cache"
    return f"the next driver {begun}; {recovery.num_queued} had waited"


def comparison(runs: Sequence[Run]) -> Iterator[Line]:
    """Yield a digest of each run's tokens and whether they are those of the first run."""
    first = runs[0]
    is_same = all(same(first, run) for run in runs)
    heading = "the same tokens in each run" if is_same else "DIFFERENT TOKENS"
    yield Line(heading, "bold green" if is_same else "bold red")
    for run in runs:
        verdict = "" if run is first else "the same" if same(first, run) else "DIFFERENT"
        num_tokens = sum(map(len, run.outputs.values()))
        what = f"{num_tokens:,} of {len(run.outputs)} requests, SHA-256 {_digest(run.outputs)}"
        line = f"  {run.title:<15} {what}  {verdict}"
        yield Line(line.rstrip(), "red" if verdict == "DIFFERENT" else "")
    for run in runs:
        yield from _differences(first, run)


def same(first: Run, other: Run) -> bool:
    """Return True if both have given the same tokens for the same requests, without an error."""
    return first.outputs == other.outputs and not first.errors and not other.errors


def _digest(outputs: Mapping[str, Sequence[int]]) -> str:
    text = msgspec.json.encode(sorted(outputs.items()))
    return hashlib.sha256(text).hexdigest()[:12]


def _differences(first: Run, other: Run) -> Iterator[Line]:
    for req_id, error in other.errors.items():
        yield Line(f"  {other.title}: request {req_id} failed: {error}", "red")
    for req_id, tokens in first.outputs.items():
        found = other.outputs.get(req_id, [])
        for place, (one, another) in enumerate(zip_longest(tokens, found)):
            if one != another:
                what = f"request {req_id} from its token {place} on: {another} in place of {one}"
                yield Line(f"  {other.title}: {what}", "red")
                break

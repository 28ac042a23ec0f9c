"""The history of all daemons that `worker-client top` watches: totals, a sample a second, and their
plots."""

from collections import deque
from collections.abc import Sequence
from typing import Final, NamedTuple

from worker_client.cli.terminal_lines import Line, sparkline
from worker_client.cli.top_frame import Seen, Totals, totals

NUM_SAMPLES: Final = 600
"""Samples that are kept: ten minutes."""
_LABEL: Final = 9
_FIGURE: Final = 8
_MIN_PLOT: Final = 10


class _Counted(NamedTuple):
    """Tokens that a daemon's process had sampled when it was last seen."""

    worker_uid: bytes
    num_tokens: int


class History:
    """Totals over time, and the tokens since top began. Belongs to one thread."""

    def __init__(self, now: float) -> None:
        """now: of the clock that times the samples, in seconds."""
        self.samples: deque[Totals] = deque(maxlen=NUM_SAMPLES)
        self.num_tokens = 0
        """Tokens that were sampled since the first sample of each daemon."""
        self.began = now
        self._counted: dict[str, _Counted] = {}

    def note(self, daemons: Sequence[Seen]) -> None:
        """Add a sample of the daemons' state; to be called once a second."""
        self.samples.append(totals(daemons))
        for seen in daemons:
            if seen.last is not None:
                status = seen.last.status
                now = _Counted(status.worker_uid, status.num_tokens)
                then = self._counted.setdefault(seen.endpoint, now)
                is_same = then.worker_uid == now.worker_uid
                self.num_tokens += now.num_tokens - (then.num_tokens if is_same else 0)
                self._counted[seen.endpoint] = now

    def lines(self, title: str, daemons: Sequence[Seen], now: float, width: int) -> list[Line]:
        """Return the title with plots of the samples and totals below it, for a terminal of that
        width."""
        plot = max(_MIN_PLOT, width - _LABEL - 2 * _FIGURE - 1)
        kept = list(self.samples)
        tokens, requests, cache = zip(*kept, strict=True) if kept else ((), (), ())
        newest = totals(daemons)
        return [
            Line(f"{title:<{_LABEL + plot}} {'now':>{_FIGURE}}{'most':>{_FIGURE}}"),
            _plotted("tokens/s", tokens, newest.tokens_per_s, plot, style="green"),
            _plotted("requests", requests, newest.requests, plot, style="cyan"),
            _plotted("KV used", cache, newest.kv_percent, plot, percent=True, style="yellow"),
            Line(self._total(daemons, now)),
        ]

    def _total(self, daemons: Sequence[Seen], now: float) -> str:
        seconds = now - self.began
        mean = self.num_tokens / seconds if seconds > 0 else 0.0
        since_start = sum(seen.last.status.num_tokens for seen in daemons if seen.last is not None)
        return (
            f"{'total':<{_LABEL}}{self.num_tokens:,} tokens in {_duration(seconds)} "
            f"({mean:,.0f}/s), {since_start:,} since the daemons' start"
        )


def _plotted(
    label: str,
    values: Sequence[float | None],
    newest: float | None,
    plot: int,
    *,
    percent: bool = False,
    style: str,
) -> Line:
    """Return a plot of the last values, with the newest and the largest of all. plot: its columns.
    percent: its height is 100 %, in place of the largest that it shows."""
    most = _most(values)
    shown = values[-plot:]
    marks = sparkline(shown, 100.0 if percent else _most(shown) or 0.0)
    unit = "%" if percent else ""
    figures = f"{_figure(newest, unit):>{_FIGURE}}{_figure(most, unit):>{_FIGURE}}"
    return Line(f"{label:<{_LABEL}}{marks:<{plot}} {figures}", style)


def _most(values: Sequence[float | None]) -> float | None:
    return max((value for value in values if value is not None), default=None)


def _figure(value: float | None, unit: str) -> str:
    return "-" if value is None else f"{value:.0f}{unit}"


def _duration(seconds: float) -> str:
    whole = int(seconds)
    if whole < 120:
        return f"{whole} s"
    return f"{whole // 60} min" if whole < 7200 else f"{whole // 3600} h {whole % 3600 // 60} min"

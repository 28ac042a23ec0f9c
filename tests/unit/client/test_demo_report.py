"""The charts and figures of the demo, of runs that are made up."""

import random

import pytest

from worker_client.cli.demo_driver import DriverReady, Finished, Lost, Replaced, StepTokens
from worker_client.cli.demo_report import HEIGHT, WIDTH, charts, comparison, recoveries, same
from worker_client.cli.demo_run import Run
from worker_client.cli.terminal_lines import BLOCKS, Line, bars, encodable, sparkline


def run_of(title: str, *messages, kill: tuple[str, float] | None = None) -> Run:
    """A run from second 100 on; the kill comes before the first later message."""
    run = Run(title)
    run.take(DriverReady(100.0, 99.0, 99.5, 0, 3), 98.0)
    for message in messages:
        if kill is not None and run.recovery is None and message.at > kill[1]:
            run.killed(kill[0], 7, kill[1])
        run.take(message, kill[1] + 0.1 if kill else 98.0)
    return run


def steps(first: float, last: float, num_tokens: int, every: float = 0.01) -> list[StepTokens]:
    count = round((last - first) / every)
    return [StepTokens(first + every * number, num_tokens) for number in range(count)]


def driver_killed() -> Run:
    return run_of(
        "driver killed",
        *steps(100.0, 103.0, 4),
        DriverReady(103.75, 103.5, 103.625, 2, 1),
        *steps(104.0, 107.0, 4),
        kill=("driver", 103.0),
    )


def rank_killed() -> Run:
    return run_of(
        "rank 1 killed",
        *steps(100.0, 101.0, 4),
        Lost(101.25, 1),
        Replaced(104.0, {"wait": 2.0, "warm_up": 0.5}),
        *steps(104.5, 107.0, 4),
        kill=("rank 1", 101.0),
    )


def test_charts_have_one_scale_and_show_where_nothing_came():
    lines = [line.text for line in charts([run_of("undisturbed", *steps(100.0, 106.99, 4)),
                                           driver_killed()], 200.0)]  # fmt: skip
    assert max(map(len, lines)) <= WIDTH
    assert lines[0] == "undisturbed: 2,796 tokens in 7.0 s"
    assert lines[HEIGHT + 2] == "driver killed at 3.0 s, next token 1.00 s later"
    plots = [line[9:] for line in lines[1 : HEIGHT + 1] + lines[HEIGHT + 3 : 2 * HEIGHT + 3]]
    assert set(plots[HEIGHT - 1]) == {"█"}, "400 a second all the time"
    lowest = plots[-1]
    assert lowest[:29].strip("█") == "" and lowest[31:39].strip() == "" and lowest[41] == "█"
    base = lines[2 * HEIGHT + 3]
    assert base.index("▲") == 9 + 30, "0.1 s a column"
    assert lines[-1].split("s")[:3] == [" " * 9 + "0 ", " " * 7 + "1 ", " " * 7 + "2 "]


def test_phases_of_a_recovery_add_up_to_it():
    for run, total_s in ((driver_killed(), 1.0), (rank_killed(), 3.5)):
        assert run.recovery.total_s == pytest.approx(total_s)
        assert sum(run.recovery.seconds.values()) == pytest.approx(total_s)
        assert min(run.recovery.seconds.values()) >= 0
    shown = [line.text for line in recoveries([driver_killed(), rank_killed()])]
    assert shown[1] == "  1.00  driver: interpreter and imports 0.40, attach 0.12, first token 0.25"
    assert shown[2].endswith("adopted 2 requests with their KV cache; 1 had waited")
    assert shown[3] == "  3.50  rank 1: successor's start 2.00, warm-up 0.50, first token 0.50"
    assert max(map(len, shown)) <= WIDTH


def test_a_kill_without_a_token_yet_is_shown_as_pending():
    run = run_of("driver killed", *steps(100.0, 101.0, 4))
    run.killed("driver", 7, 101.0)
    lines = [line.text for line in charts([run], 110.0)]
    assert lines[0] == "driver killed at 1.0 s, next token ..."
    assert 0 < lines[HEIGHT + 1].index("▲") - 9 <= 7, "a tenth of the time"


def test_runs_that_differ_are_told_by_request_and_place():
    first, other, short = (run_of(title) for title in ("undisturbed", "b", "c"))
    for run, tokens in ((first, [1, 2, 3]), (other, [1, 5, 3]), (short, [1, 2])):
        run.take(Finished("x", tokens), 98.0)
    assert same(first, first) and not same(first, other) and not same(first, short)
    shown = [line.text for line in comparison([first, other, short])]
    assert shown[0] == "DIFFERENT TOKENS"
    assert "  b: request x from its token 1 on: 5 in place of 2" in shown
    assert "  c: request x from its token 2 on: None in place of 3" in shown
    failed = run_of("d")
    failed.take(Finished("x", [1, 2, 3], "it was NaN"), 98.0)
    assert not same(first, failed)
    assert any("request x failed: it was NaN" in line.text for line in comparison([first, failed]))


def test_bars_and_sparklines_are_as_high_as_their_values():
    seed = random.randrange(1 << 30)
    values = [round(random.Random(seed + n).uniform(0, 50), 3) for n in range(60)] + [0.0, 50.0]
    rows = bars(values, 50.0, 4)
    for place, value in enumerate(values):
        eighths = sum(BLOCKS.index(row[place]) + 1 for row in rows if row[place] != " ")
        assert value * 32 / 50 <= eighths < value * 32 / 50 + 1, (seed, value)
        assert "".join(row[place] for row in rows).lstrip().strip("█")[1:] == "", "no holes"
    marks = sparkline([*values, None], 50.0)
    assert marks[-3:] == "▁█ "
    for value, mark in zip(values, marks, strict=False):
        assert (mark == "▁") == (value == 0) and abs(BLOCKS.index(mark) - value * 7 / 50) < 1
    assert bars([0.0, 0.0], 0.0, 1) == ["  "] and sparkline([0.0, None], 0.0) == "▁ "


def test_plots_are_in_ascii_where_the_encoding_has_no_blocks():
    line = Line("    826 ┤▁▄█ └─▲ naïve")
    assert encodable(line, "utf-8") is line
    assert encodable(line, "latin-1").text == "    826 |.-# +-^ naïve"

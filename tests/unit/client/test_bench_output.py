"""The output of bench, on a terminal and elsewhere, and the comparison of two runs, on fake
daemons."""

import json
import re
import sys

import pytest

from tests.unit.client.conftest import options
from worker_client.cli.arrivals import with_arrivals
from worker_client.cli.input_request import InputRequest

LINE = '{{"id": "{0}", "prompt_token_ids": [{0}, 2], "max_tokens": 6, "ignore_eos": true}}\n'


@pytest.fixture
def words(fakes, directory):
    source = directory / "in.jsonl"
    source.write_text("".join(LINE.format(index) for index in range(6)))
    return [*options(fakes(1), directory), "--input", source]


@pytest.fixture
def on_terminal(monkeypatch, capsys):
    """Let commands find a terminal of 80 columns as standard output."""
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.delenv("NO_COLOR", raising=False)
    monkeypatch.setattr(type(sys.stdout), "isatty", lambda self: True)


def test_arrivals_are_waited_for_and_timed_from_when_they_are_due(run, words):
    code, out, errors = run("bench", *words, "--request-rate", 20)
    assert code == 0, errors
    paced = json.loads(out)
    at_once = json.loads(run("bench", *words, "--json")[1])
    assert (paced["request_rate"], at_once["request_rate"]) == (20.0, None)
    last_s = with_arrivals([InputRequest(str(n), None) for n in range(6)], 20, 0)[-1].arrival_s
    assert paced["seconds"] > last_s > 0.05
    for figures in (paced, at_once):
        assert (figures["tokens_out"], figures["failed"]) == (36, 0)
        assert figures["req_s"] == pytest.approx(6 / figures["seconds"])
        for name in ("ttft_ms", "tpot_ms", "itl_ms"):
            assert 0 < figures[name]["p50"] <= figures[name]["p90"] <= figures[name]["p99"]
            assert figures[name]["mean"] <= figures["seconds"] * 1e3
    assert paced["step_ms"]["decode"]["count"] > at_once["step_ms"]["decode"]["count"]


@pytest.mark.parametrize("rate", ["0", "-3", "nan"])
def test_a_rate_that_is_none_is_refused(run, words, rate):
    code, _, errors = run("bench", *words, "--request-rate", rate)
    assert (
        code == 2 and "field request_rate" in errors and "; fix: give requests per second" in errors
    )


@pytest.mark.usefixtures("on_terminal")
def test_a_terminal_gets_a_table_unless_json_is_asked_for(run, words, monkeypatch):
    code, colored, _ = run("bench", *words, "--request-rate", 100)
    assert code == 0 and "\x1b[1;32m" in colored
    shown = re.sub(r"\x1b\[[0-9;]*m", "", colored)
    lines = shown.splitlines()
    assert max(map(len, lines[1:])) <= 79
    assert re.search(r"^requests +6, 100 a second$", shown, re.MULTILINE)
    assert re.search(r"^tokens +12 in, 36 out$", shown, re.MULTILINE)
    for label in ("time to first token", "time per output token", "inter-token latency"):
        (row,) = (line for line in lines if line.startswith(label))
        mean, p50, p90, p99 = map(float, row.removeprefix(label).split())
        assert 0 < p50 <= p90 <= p99 and mean <= p99
    assert json.loads(run("bench", *words, "--json")[1])["requests"] == 6
    monkeypatch.setenv("NO_COLOR", "1")
    assert not re.search(r"\x1b\[[0-9;]*3\d", run("bench", *words)[1])


def written(directory, name, **changes):
    latency = {"mean": 10.0, "p50": 9.0, "p90": 15.0, "p99": None}
    figures = {
        "model": "/m",
        "device": "cpu",
        "request_rate": None,
        "requests": 6,
        "failed": 0,
        "tokens_in": 12,
        "tokens_out": 36,
        "providers": {},
        "versions": {"python": "3"},
        "req_s": 2.0,
        "out_tok_s": 100.0,
        "total_tok_s": 0.0,
        "ttft_ms": latency,
        "step_ms": {"decode": {**latency, "count": 9}, "mixed": latency},
        **changes,
    }
    path = directory / name
    path.write_text(json.dumps(figures))
    return path


def test_comparison_says_what_is_better_and_what_makes_it_unfair(run, directory, on_terminal):
    before = written(directory, "before.json")
    faster = {"mean": 5.0, "p50": 9.0, "p90": 30.0, "p99": 1.0}
    after = written(
        directory, "after.json", out_tok_s=125.0, req_s=1.0, ttft_ms=faster, request_rate=4.0,
        step_ms={"decode": faster},
    )  # fmt: skip
    code, out, _ = run("bench-compare", before, after, "--json")
    assert code == 0
    result = json.loads(out)
    found = {
        figure["name"]: (figure["change_percent"], figure["verdict"])
        for figure in result["figures"]
    }
    assert found == {
        "tokens per second, out": (25.0, "better"),
        "tokens per second, all": (None, ""),
        "requests per second": (-50.0, "worse"),
        "time to first token, ms mean": (-50.0, "better"),
        "time to first token, ms p50": (0.0, ""),
        "time to first token, ms p90": (100.0, "worse"),
        "decode step, ms mean": (-50.0, "better"),
        "decode step, ms p50": (0.0, ""),
        "decode step, ms p90": (100.0, "worse"),
    }
    assert result["differences"] == {"request_rate": [None, 4.0]}
    code, colored, _ = run("bench-compare", before, after)
    shown = re.sub(r"\x1b\[[0-9;]*m", "", colored)
    assert code == 0 and max(map(len, shown.splitlines())) <= 79
    assert re.search(r"^tokens per second, out +100.00 +125.00 +\+25.0 %  better$", shown, re.M)
    assert "the runs differ in request_rate: null, then 4.0" in shown


def test_comparison_of_real_runs_has_no_differences(run, words, directory):
    paths = [directory / name for name in ("a.json", "b.json")]
    for path in paths:
        path.write_text(run("bench", *words)[1])
    code, out, errors = run("bench-compare", *paths)
    assert (code, errors) == (0, "")
    result = json.loads(out)
    assert result["differences"] == {}
    assert {"tokens per second, out", "inter-token latency, ms p99", "decode step, ms p50"} <= {
        figure["name"] for figure in result["figures"]
    }


@pytest.mark.parametrize(("content", "words"), [
    (None, "cannot be read"), ("{", "cannot be read"), ("[]", "not the output of bench"),
    ('{"step_ms": 3}', "not the output of bench"), (b"\xff", "cannot be read"),
])  # fmt: skip
def test_files_that_are_no_runs_are_refused_by_name(run, directory, content, words):
    path = directory / "wrong.json"
    if content is not None:
        path.write_bytes(content if isinstance(content, bytes) else content.encode())
    code, out, errors = run("bench-compare", written(directory, "good.json"), path)
    assert code == 2 and not out
    assert str(path) in errors and words in errors and "; fix: name the output of" in errors

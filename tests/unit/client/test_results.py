"""The content of a run's output file, whenever the run ends."""

import json
from pathlib import Path

import pytest

from worker_client.cli.results import Results, read_finished
from worker_client.errors import OutputError


def line(name):
    return {"id": name, "token_ids": [1, 2]}


def test_lines_of_a_run_before_are_never_out_of_the_file(tmp_path):
    """Whoever has the old file open still reads it whole: it was not written over."""
    path = tmp_path / "out.jsonl"
    path.write_text("".join(json.dumps(line(name)) + "\n" for name in ("a", "b", "d")))
    kept = read_finished(path)
    with path.open() as old, Results(["a", "b", "c", "d"], None, kept, path):
        assert [json.loads(text)["id"] for text in old] == ["a", "b", "d"]
        assert list(read_finished(path)) == ["a", "b", "d"]
    assert list(read_finished(path)) == ["a", "b", "d"], "c is missing: the run can be resumed"


def test_a_device_is_no_output(tmp_path):
    with (
        pytest.raises(OutputError, match="name a regular file"),
        Results(["a"], None, {"a": line("a")}, Path("/dev/null")),
    ):
        raise AssertionError("not reached")

"""The content of a run's output file, whenever the run ends."""

import json

from worker_client.cli.results import Results, read_finished


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
    assert [entry.name for entry in tmp_path.iterdir()] == ["out.jsonl"]


def test_what_is_no_file_is_written_to_as_it_is(tmp_path):
    with Results(["a"], None, {"a": line("a")}, tmp_path / "new.jsonl"):
        assert list(read_finished(tmp_path / "new.jsonl")) == ["a"]
    with Results(["a"], None, {"a": line("a")}, tmp_path.__class__("/dev/null")):
        pass

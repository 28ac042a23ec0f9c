"""An input line that cannot be served does not affect other lines."""

import io
import json
import shutil
import sys

import pytest

from rpc_schema.sampling import MAX_STOP_TOKEN_IDS
from tests.unit.client.conftest import options
from worker_client.cli.demo_model import make_demo_model
from worker_client.cli.run import _print_texts
from worker_client.errors import RequestError
from worker_client.inputs.request_checks import validated
from worker_client.inputs.request_parser import RequestParser
from worker_client.requests import GenerationRequest, SamplingParams

GOOD = b'{"id": "%s", "prompt_token_ids": [1, 2, 3], "max_tokens": 4, "ignore_eos": true}'
MANY = json.dumps(list(range(MAX_STOP_TOKEN_IDS + 1))).encode()
BAD = {
    b'{"id": "a\\ud800", "prompt_token_ids": [1]}': "id is not Unicode text",
    b'{"prompt": "one \\udcff half"}': "prompt is not Unicode text",
    b'{"prompt": "\xe9"}': "not UTF-8: invalid continuation byte at byte 13",
    b'{"\\ud800\\u001b[31m": 1, "prompt_token_ids": [1]}': r"field \ud800\x1b[31m",
    b'{"prompt_token_ids": [1], "stop_token_ids": %s}' % MANY: f"at most {MAX_STOP_TOKEN_IDS}",
    b'{"prompt_token_ids": [1], "temperature": 1%s}' % (b"0" * 400): "temperature has the wrong",
    b"\xff\xfe": "not UTF-8: invalid start byte at byte 1",
    b'{"prompt": 3}': "prompt has the wrong type",
    b'{"id": "huge", "prompt_token_ids": [1], "%s": 0}' % (b"x" * 100_000): "unknown field",
}


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory):
    path = tmp_path_factory.mktemp("model")
    make_demo_model(path)
    return path / "tokenizer.json"


@pytest.mark.parametrize("command", ["generate", "bench"])
def test_bad_lines_are_lines_of_the_output_and_the_others_are_served(
    fakes, directory, run, command, tokenizer
):
    shutil.copy(tokenizer, directory)
    source, target = directory / "in.jsonl", directory / "out.jsonl"
    good = [b"%d" % number for number in range(len(BAD) - 1)] + [b"line 2"]  # as a bad line's name
    pairs = zip(good, BAD, strict=True)
    source.write_bytes(b"".join(GOOD % name + b"\n" + bad + b"\n" for name, bad in pairs))
    words = [*options(fakes(1), directory), "--input", source, "--output", target]
    code, _, errors = run(command, *words)
    assert code == 0, errors
    results = [json.loads(text) for text in target.read_bytes().decode().splitlines()]
    assert [result["id"] for result in results[::2]] == [name.decode() for name in good]
    assert all(len(result["token_ids"]) == 4 for result in results[::2])
    names = [result["id"] for result in results[1::2]]
    assert names == [
        "line 2 of the input",
        *(f"line {2 * number}" for number in range(2, len(BAD) + 1)),
    ]
    for result, reason in zip(results[1::2], BAD.values(), strict=True):
        assert result.keys() == {"id", "error"}
        assert reason in result["error"] and "; fix: " in result["error"]
        assert len(result["error"]) < 1000
        assert result["error"].encode()  # which half a surrogate pair would not let be
        assert f"{result['id']}: {result['error']}\n" in errors
    assert "\x1b" not in errors


def test_stop_tokens_are_bounded_with_those_of_the_model():
    ids = tuple(range(MAX_STOP_TOKEN_IDS))
    request = RequestParser(None).parse(
        json.dumps({"prompt_token_ids": [1], "stop_token_ids": [*ids, *ids]}), 0
    )
    assert SamplingParams.of(request.extensions([5])).stop_token_ids[0] == 5
    with pytest.raises(RequestError, match=f"at most {MAX_STOP_TOKEN_IDS}"):
        request.extensions([MAX_STOP_TOKEN_IDS])


def test_drivers_are_told_of_an_id_that_no_message_can_carry():
    with pytest.raises(RequestError, match="lone surrogate") as caught:
        validated(GenerationRequest("a\udc80", prompt=RequestParser(None).parse(
            '{"prompt_token_ids": [1]}', 0).prompt))  # fmt: skip
    assert caught.value.field == "id"


def test_no_line_is_named_twice(fakes, directory, run):
    source = directory / "in.jsonl"
    source.write_bytes(GOOD % b"ok" + b'\n{"prompt_token_ids": []}\n')
    _, _, errors = run("generate", *options(fakes(1), directory), "--input", source)
    assert "\nline 2: the length of the prompt " in f"\n{errors}"


@pytest.mark.parametrize("req_id", [b"", b'"id": "own", '])
def test_request_that_cannot_be_admitted_is_told_by_its_line(fakes, directory, run, req_id):
    source, target = directory / "in.jsonl", directory / "out.jsonl"
    long = b"{%s" % req_id + b'"prompt_token_ids": %s}' % str([1] * 600).encode()
    source.write_bytes(GOOD % b"ok" + b"\n\n" + long + b"\n")
    words = [*options(fakes(1), directory), "--input", source, "--output", target]
    code, _, errors = run("generate", *words)
    name = "own" if req_id else "2"
    assert code == 0 and f"\nline 3, request {name}: the prompt's" in f"\n{errors}"
    assert json.loads(target.read_text().splitlines()[1])["id"] == name


def test_what_a_line_says_does_not_reach_the_terminal_raw(fakes, directory, run):
    source = directory / "in.jsonl"
    long = b'{"id": "\\u001b[2J\\nfalse", "prompt_token_ids": %s}' % str([1] * 600).encode()
    source.write_bytes(GOOD % b"\\u001b[31m" + b"\n" + long)
    _, out, errors = run("generate", *options(fakes(1), directory), "--input", source)
    assert "\x1b" not in out + errors
    assert out.startswith(r"\x1b[31m: [") and r"request \x1b[2J\nfalse: " in errors


class Terminal(io.StringIO):
    def isatty(self):
        return True


@pytest.mark.parametrize("kind", [Terminal, io.StringIO])
def test_texts_are_escaped_for_terminals_alone(monkeypatch, kind):
    text = "é\t1\n\x1b]0;title\x07\u202e"
    monkeypatch.setattr(sys, "stdout", kind())
    _print_texts([{"id": "a", "text": text, "token_ids": []}])
    shown = "é\t1\n\\x1b]0;title\\x07\\u202e" if kind is Terminal else text
    assert sys.stdout.getvalue() == f"a: {shown}\n"


def test_standard_output_of_few_characters_costs_no_result(fakes, directory, run, monkeypatch):
    source, written = directory / "in.jsonl", io.BytesIO()
    source.write_bytes(GOOD % "é".encode())
    words = [*options(fakes(1), directory), "--input", source]
    monkeypatch.setattr(sys, "stdout", io.TextIOWrapper(written, encoding="ascii"))
    assert run("generate", *words)[0] == 0
    assert written.getvalue().startswith(rb"\xe9: [")


def test_unknown_field_is_named_as_it_is():
    with pytest.raises(RequestError) as caught:
        RequestParser(None).parse(r'{"a\\b\u001b": 1}', 0)
    assert caught.value.field == r"a\b\x1b"


def test_nothing_is_loaded_for_an_input_without_a_line_to_serve(fakes, directory, run):
    daemons = fakes(1)
    source, target = directory / "in.jsonl", directory / "out.jsonl"
    source.write_text('{"prompt": "text"}\n[]\n')
    words = [*options(daemons, directory), "--input", source, "--output", target]
    code, _, errors = run("generate", *words)
    assert code == 1
    assert errors.startswith("line 1: the model has no tokenizer.json")
    assert [json.loads(line)["id"] for line in target.read_text().splitlines()] == [
        "line 1",
        "line 2",
    ]
    (directory / "tokenizer.json").write_text("{")
    code, _, errors = run("generate", *words)
    assert code == 2 and "cannot read the tokenizer" in errors
    assert daemons.daemons[0].operations == []


def test_errors_are_not_wrapped(fakes, directory, run, monkeypatch):
    """Standard error is no terminal: a line is a line."""
    monkeypatch.setenv("COLUMNS", "40")
    source = directory / "in.jsonl"
    source.write_bytes(GOOD % b"ok" + b'\n{"prompt_token_ids": [1], "best": 2}')
    _, _, errors = run("generate", *options(fakes(1), directory), "--input", source)
    (line,) = [text for text in errors.splitlines() if "unknown field" in text]
    assert line.startswith("line 2: unknown field") and line.endswith("top_k, top_p")
    settings = directory / "settings.toml"
    settings.write_text("block_sise = 8\n")
    _, _, errors = run("generate", "--config", settings, "--model", directory, "--prompt", "a")
    assert "sets 'block_sise', which is not an option of this command" in errors

"""Input lines that name files of embeddings, and the files that are refused."""

import json
import os

import numpy as np
import pytest
import torch
from safetensors.torch import save_file

from tests.support.embedded_prompts import EmbeddedPrompt, save
from worker_client.errors import RequestError
from worker_client.inputs.embeds_files import EmbedsFiles
from worker_client.inputs.prompt_embeds import PLACEHOLDER, host_tensor
from worker_client.inputs.request_parser import RequestParser


def parse(directory, **fields):
    parser = RequestParser(lambda text: [len(text)] * 3, 1, directory=directory)
    return parser.parse(json.dumps(fields), 0)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
@pytest.mark.parametrize("at", [(), ((1, 3), (5, 2))])
def test_a_line_has_the_rows_of_its_file_at_its_positions(tmp_path, dtype, at):
    rows = torch.randn(5, 8).to(dtype)
    prompt = EmbeddedPrompt([3, 4, 5], rows, at)
    request = parse(tmp_path, **save(prompt, tmp_path, "one"))
    assert request.prompt_embeds.content_hash == host_tensor(prompt.embeds).content_hash
    ids = request.prompt.tolist()
    taken = [
        position for start, length in at or ((0, 5),) for position in range(start, start + length)
    ]
    assert [ids[position] for position in taken] == [PLACEHOLDER] * 5
    assert [token for position, token in enumerate(ids) if position not in taken] == [3, 4, 5]
    (own,) = [each for each in request.extensions(()) if each.uploads]
    assert own.num_rows == 5 and own.width == 8


def test_text_follows_the_rows_and_a_file_is_read_once(tmp_path):
    np.save(tmp_path / "a.npy", np.ones((2, 8), np.float32))
    assert parse(tmp_path, prompt="four", prompt_embeds="a.npy").prompt.tolist() == [
        *[PLACEHOLDER] * 2,
        *[4] * 3,
    ]
    files = EmbedsFiles(tmp_path)
    assert files.read("a.npy") is files.read("a.npy")


def test_of_several_tensors_the_named_one_is_read(tmp_path):
    rows = {"other": torch.zeros(3, 8), "prompt_embeds": torch.ones(2, 8)}
    save_file(rows, tmp_path / "a.safetensors", metadata={"made": "here"})
    found = EmbedsFiles(tmp_path).read("a.safetensors")
    assert np.frombuffer(found.data, np.float32).tolist() == [1.0] * 16
    save_file({"one": torch.zeros(3, 8), "two": torch.zeros(3, 8)}, tmp_path / "b.safetensors")
    with pytest.raises(RequestError, match="named prompt_embeds"):
        EmbedsFiles(tmp_path).read("b.safetensors")


@pytest.fixture
def hostile(tmp_path):
    """A directory with what should not be read, beside one that should."""
    (tmp_path / "out").mkdir()
    good = np.ones((2, 8), np.float32)
    np.save(tmp_path / "out" / "secret.npy", good)
    inside = tmp_path / "in"
    inside.mkdir()
    np.save(inside / "good.npy", good)
    (inside / "link.npy").symlink_to(tmp_path / "out" / "secret.npy")
    (inside / "within.npy").symlink_to(inside / "good.npy")
    (inside / "there").symlink_to(tmp_path / "out")
    os.mkfifo(inside / "pipe.npy")
    (inside / "folder.npy").mkdir()
    raw = (inside / "good.npy").read_bytes()
    (inside / "cut.npy").write_bytes(raw[:-1])
    (inside / "more.npy").write_bytes(raw + b"\0")
    (inside / "empty.npy").write_bytes(b"")
    np.save(inside / "ints.npy", np.ones((2, 8), np.int64))
    np.save(inside / "flat.npy", np.ones(16, np.float32))
    np.save(inside / "fortran.npy", np.asfortranarray(np.ones((2, 8), np.float32)))
    np.save(inside / "objects.npy", np.array([[{}]], object), allow_pickle=True)
    np.savez(inside / "zip.npy", good)
    (inside / "zip.npy.npz").rename(inside / "zip.npy")
    header = json.dumps({"a": {"dtype": "F32", "shape": [2, 8], "data_offsets": [0, 64]}}).encode()
    size = len(header).to_bytes(8, "little")
    (inside / "good.safetensors").write_bytes(size + header + bytes(64))
    (inside / "cut.safetensors").write_bytes(size + header + bytes(63))
    (inside / "huge.safetensors").write_bytes(b"\xff" * 8 + header)
    for name, fields in {
        "negative": {"dtype": "F32", "shape": [-2, -8], "data_offsets": [0, 64]},
        "short": {"dtype": "F32", "shape": [2, 8], "data_offsets": [0, 60]},
        "kind": {"dtype": "I64", "shape": [2, 4], "data_offsets": [0, 64]},
        "text": "no",
    }.items():
        own = json.dumps({"a": fields}).encode()
        (inside / f"{name}.safetensors").write_bytes(
            len(own).to_bytes(8, "little") + own + bytes(64)
        )
    return inside


@pytest.mark.parametrize("name", ["good.npy", "./good.npy", "good.safetensors"])
def test_good_files_are_read(hostile, name):
    assert EmbedsFiles(hostile).read(name).shape == (2, 8)


@pytest.mark.parametrize(
    "name",
    [
        "../out/secret.npy", "link.npy", "within.npy", "there/secret.npy", "pipe.npy", "folder.npy",
        "cut.npy", "more.npy", "empty.npy", "ints.npy", "flat.npy", "fortran.npy", "objects.npy",
        "zip.npy", "none.npy", "good.txt", "", "a\0b.npy", "cut.safetensors", "huge.safetensors",
        "negative.safetensors", "short.safetensors", "kind.safetensors", "text.safetensors",
    ],
)  # fmt: skip
def test_other_files_are_refused(hostile, name):
    with pytest.raises(RequestError) as refused:
        EmbedsFiles(hostile).read(name)
    assert refused.value.field == "prompt_embeds"
    with pytest.raises(RequestError):
        EmbedsFiles(hostile).read(str(hostile / "good.npy"))


def test_lines_without_a_directory_and_positions_without_rows_are_refused(tmp_path):
    np.save(tmp_path / "a.npy", np.ones((2, 8), np.float32))
    for directory, fields, field in (
        (None, {"prompt_embeds": "a.npy"}, "prompt_embeds"),
        (tmp_path, {"prompt": "x", "prompt_embeds_at": [[0, 2]]}, "prompt_embeds"),
        (tmp_path, {"prompt_embeds": "a.npy", "prompt_embeds_at": [[0, 1]]}, "prompt_embeds_at"),
        (tmp_path, {"prompt_embeds": "a.npy", "prompt_embeds_at": [[1, 2]]}, "prompt_embeds_at"),
        (tmp_path, {"prompt_embeds": "a.npy", "prompt_embeds_at": [[0, "x"]]}, "prompt_embeds_at"),
        (tmp_path, {"prompt_embeds": 4}, "prompt_embeds"),
    ):
        with pytest.raises(RequestError) as refused:
            parse(directory, **fields)
        assert refused.value.field == field and refused.value.line == 1

"""Checkpoints made to exhaust a daemon's memory or time, or to read other files: each immediately
gives a typed error that names field and fix."""

import json
import os
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from rpc_schema.config import ModelConfig
from rpc_schema.errors import CheckpointError, ConfigError
from tests.support.waiting import PATIENCE_S
from worker_client.errors import ClientConfigError
from worker_client.inputs.tokenizer import load_tokenizer
from worker_daemon.models.config import parse_model_config, read_model_config
from worker_daemon.models.safetensors_file import MalformedError, SafetensorsFile
from worker_daemon.models.saved_set import read_saved_set
from worker_daemon.models.weights import read_headers
from worker_daemon.regular_file import MAX_TEXT_BYTES
from worker_daemon.settings import read_file
from worker_daemon.worker.resolve import confine_directory, resolve_model

BASE = {
    "architectures": ["LlamaForCausalLM"],
    "vocab_size": 32,
    "hidden_size": 16,
    "intermediate_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "max_position_embeddings": 64,
}
HUGE = 10**400

pytestmark = pytest.mark.timeout(PATIENCE_S)


@pytest.mark.parametrize(
    ("fields", "named"),
    [
        ({"num_hidden_layers": 500_000_000}, "num_hidden_layers"),
        ({"num_hidden_layers": 300_000}, "num_hidden_layers"),
        ({"vocab_size": 1 << 40}, "vocab_size"),
        ({"hidden_size": HUGE}, "hidden_size"),
        ({"intermediate_size": 1 << 31}, "intermediate_size"),
        ({"num_attention_heads": 1 << 20, "head_dim": 2}, "num_attention_heads"),
        ({"num_key_value_heads": HUGE}, "num_key_value_heads"),
        ({"head_dim": 1 << 20}, "head_dim"),
        ({"hidden_size": 1 << 20, "num_attention_heads": 1}, "num_attention_heads"),
        ({"max_position_embeddings": HUGE}, "max_position_embeddings"),
        ({"rms_norm_eps": HUGE}, "rms_norm_eps"),
        ({"rms_norm_eps": 1e300}, "rms_norm_eps"),
        ({"rope_theta": HUGE}, "rope_theta"),
        ({"eos_token_id": [HUGE]}, "eos_token_id"),
        ({"eos_token_id": [1] * 100_000}, "eos_token_id"),
        ({"architectures": ["A" * 1_000_000]}, "architectures"),
        ({"architectures": ["x\0y\ud800\x1b[2J"]}, "architectures"),
        ({"hidden_act": "\ud800" * 500}, "hidden_act"),
        ({"rope_scaling": {"rope_type": "x\0\ud800"}}, "rope_scaling.rope_type"),
    ],
)
def test_field_that_no_model_has_is_refused_and_fits_a_reply(fields, named):
    with pytest.raises(ConfigError) as caught:
        parse_model_config({**BASE, **fields})
    assert caught.value.field == named
    assert len(str(caught.value).encode()) < 4096


def test_character_that_is_not_printable_is_shown_by_its_code():
    rope = {"rope_type": "a\u2028b\U000e0001"}
    with pytest.raises(ConfigError, match=r"rope_type a\\u2028b\\U000e0001 is") as caught:
        parse_model_config({**BASE, "rope_scaling": rope})
    assert str(caught.value).isprintable()


def yarn(**factors: float) -> dict[str, object]:
    return {"rope_type": "yarn", "factor": 2.0, **factors}


@pytest.mark.parametrize(
    "rope",
    [
        {"rope_type": "linear", "factor": 1e-300},
        {"rope_type": "linear", "factor": 1e-37},
        {
            "rope_type": "llama3",
            "factor": 1e-45,
            "low_freq_factor": 1,
            "high_freq_factor": 4,
            "original_max_position_embeddings": 8,
        },
        {
            "rope_type": "longrope",
            "short_factor": [*[1.0] * 3, 1e-37],
            "long_factor": [1.0] * 4,
            "original_max_position_embeddings": 8,
        },
        {
            "rope_type": "longrope",
            "short_factor": [1.0] * 4,
            "long_factor": [1.0] * 4,
            "original_max_position_embeddings": 1,
        },
        yarn(factor=1e-320),
        yarn(beta_fast=1e-320),
        yarn(beta_slow=1e-320),
        yarn(mscale=1.0, mscale_all_dim=-0.5, factor=4.851651954097903e8),
    ],
)
def test_rope_whose_table_would_not_be_finite_is_refused(rope):
    with pytest.raises(ConfigError, match=r"not finite.*fix: correct"):
        parse_model_config({**BASE, "max_position_embeddings": 1 << 20, "rope_scaling": rope})


@pytest.mark.parametrize("asked", [None, 1 << 30])
def test_context_whose_table_would_take_all_memory_is_refused(tmp_path, asked):
    path = model(tmp_path / "m")
    (path / "config.json").write_text(json.dumps({**BASE, "max_position_embeddings": 10**30}))
    with pytest.raises(ConfigError, match=r"rotary table.*max_model_len.*fix: give a"):
        resolve_model(ModelConfig(model="m", max_model_len=asked), [tmp_path])
    resolved = resolve_model(ModelConfig(model="m", max_model_len=4096), [tmp_path])
    assert resolved.max_model_len == 4096


# What is no regular file, or far too large.


def sparse(path: Path) -> None:
    with path.open("wb") as file:
        file.truncate(8 << 30)


STRANGE = [
    pytest.param(os.mkfifo, id="fifo"),
    pytest.param(Path.mkdir, id="directory"),
    pytest.param(lambda path: path.symlink_to("/dev/zero"), id="device"),
    pytest.param(sparse, id="sparse"),
]


def model(path: Path, without: str = "") -> Path:
    """A directory of valid files of which one is missing."""
    path.mkdir()
    contents = {"config.json": BASE, "generation_config.json": {}}
    for name, content in contents.items():
        if name != without:
            (path / name).write_text(json.dumps(content))
    return path


@pytest.mark.parametrize("make", STRANGE)
@pytest.mark.parametrize("name", ["config.json", "generation_config.json"])
def test_config_that_is_no_small_regular_file(tmp_path, make, name):
    path = model(tmp_path / "m", without=name)
    make(path / name)
    with pytest.raises(CheckpointError, match=f"{name} cannot be read.*fix: "):
        read_model_config(path)


@pytest.mark.parametrize("make", STRANGE)
@pytest.mark.parametrize("name", ["model.safetensors", "model.safetensors.index.json"])
def test_weights_that_are_no_regular_file(tmp_path, make, name):
    make(tmp_path / name)
    with pytest.raises(CheckpointError, match=f"{name} is .*fix: "):
        read_headers(tmp_path)


@pytest.mark.parametrize("make", STRANGE)
def test_other_files_that_are_no_small_regular_ones(tmp_path, make):
    for name in ("index.json", "tokenizer.json", "d.toml"):
        make(tmp_path / name)
    with pytest.raises(CheckpointError, match=r"index\.json cannot be read"):
        read_saved_set(tmp_path)
    with pytest.raises(ClientConfigError, match="cannot read the tokenizer: it is not a regular"):
        load_tokenizer(tmp_path)
    with pytest.raises(ConfigError, match="the file cannot be read"):
        read_file(tmp_path / "d.toml")


def test_config_as_large_as_is_read_is_quick(tmp_path):
    (tmp_path / "config.json").write_bytes(b"[" + b"[]," * (MAX_TEXT_BYTES // 3) + b"[]]")
    with pytest.raises(CheckpointError, match="config"):
        read_model_config(tmp_path)


# Files that an index names.


@pytest.fixture
def indexed(tmp_path):
    """A function that makes a model whose index names this file, which holds a tensor."""

    def make(name: object) -> Path:
        path = model(tmp_path / "root" / "m") if (tmp_path / "root").mkdir() is None else None
        save_file({"w": torch.ones(2)}, tmp_path / "tensors")
        index = json.dumps({"weight_map": {"w": name}})
        (path / "model.safetensors.index.json").write_text(index)
        return path

    return make


@pytest.mark.parametrize(
    "name",
    [
        *("x.bin", "x.SAFETENSORS", "x.tensors", "x.safetensors.bin", "x", ".", "..", ""),
        *("../tensors", "/etc/passwd", "a/x.safetensors", "x\0y.safetensors", 3, None),
        *("\ud800.safetensors", "\x1b[2Jx.safetensors"),
    ],
)
def test_index_names_plain_safetensors_files_alone(indexed, tmp_path, name):
    path = indexed(name)
    for planted in ("x.bin", "x.SAFETENSORS", "x.tensors", "x", "x.safetensors.bin"):
        (path / planted).write_bytes((tmp_path / "tensors").read_bytes())
    with pytest.raises(CheckpointError, match="not a plain file name") as caught:
        read_headers(path)
    str(caught.value).encode()


@pytest.mark.parametrize("name", ["x.safetensors", "x.tensors", "rank-0.json"])
def test_link_out_of_the_root_is_refused_before_it_is_opened(indexed, tmp_path, name):
    path = indexed("x.safetensors")
    (path / name).symlink_to(tmp_path / "tensors")
    for resolve in (
        lambda: confine_directory("m", [tmp_path / "root"]),
        lambda: resolve_model(ModelConfig(model="m"), [tmp_path / "root"]),
    ):
        with pytest.raises(ConfigError, match="a link to outside"):
            resolve()


def test_link_within_the_root_is_read(indexed, tmp_path):
    """As the caches of model hubs have them: the target's name has no ending."""
    path = indexed("x.safetensors")
    (tmp_path / "root" / "blob").write_bytes((tmp_path / "tensors").read_bytes())
    (path / "x.safetensors").symlink_to("../blob")
    confine_directory("m", [tmp_path / "root"])
    assert read_headers(path)["w"].shape == (2,)


# Headers of safetensors files.


def tensor(begin: int, end: int, **fields: object) -> dict[str, object]:
    return {"dtype": "F32", "shape": [(end - begin) // 4], "data_offsets": [begin, end], **fields}


def write(path: Path, header: object, data: int = 16, length: int | None = None) -> Path:
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    size = len(text) if length is None else length
    path.write_bytes(size.to_bytes(8, "little") + text + bytes(data))
    return path


@pytest.mark.parametrize(
    "header",
    [
        {"a": tensor(0, 8), "b": tensor(4, 16)},
        {"a": tensor(0, 8), "b": tensor(12, 16)},
        {"a": tensor(4, 16)},
        {"a": tensor(0, 12)},
        {"a": tensor(0, 20)},
        {"a": tensor(16, 0)},
        {"a": tensor(0, 16, shape=[-4])},
        {"a": tensor(0, 16, shape=[3])},
        {"a": tensor(0, 16, shape=[4.0])},
        {"a": tensor(0, 16, shape=[True, 4])},
        {"a": tensor(0, 16, shape=[10**400])},
        {"a": tensor(0, 16, shape=[1] * 1000)},
        {"a": tensor(0, 16, data_offsets=[0, 16, 16])},
        {"a": tensor(0, 16, data_offsets=["0", 16])},
        {"a": tensor(0, 16, dtype=3)},
        {"a": tensor(0, 16, more=1)},
        {"a": [0, 16]},
        {"a" * 5000: tensor(0, 16)},
        {"layers.0.a": tensor(0, 8, shape=[2]), "model.layers.0.a": tensor(8, 16, shape=[2])},
        {},
        [],
        b"",
        b"{",
        b"\xff",
        b"[" * 100_000,
        b'{"a":' + json.dumps(tensor(0, 16)).encode() + b',"a":{}}',
    ],
)
def test_header_that_does_not_describe_the_file(tmp_path, header):
    with pytest.raises(MalformedError):
        SafetensorsFile(write(tmp_path / "x", header))


MANY = 70_000


@pytest.mark.parametrize(
    "header",
    [
        pytest.param({f"t{i}": tensor(0, 0) for i in range(MANY)}, id="tensors"),
        pytest.param({"__metadata__": {"a": [0] * 1_200_000}}, id="list"),
        pytest.param({"__metadata__": {"a": [[]] * 700_000}}, id="lists"),
        pytest.param({"__metadata__": {"a": [{}] * 700_000}}, id="objects"),
        pytest.param({"__metadata__": {str(i): "" for i in range(MANY)}}, id="metadata"),
        pytest.param({"__metadata__": {"a": "x" * (17 << 20)}}, id="bytes"),
    ],
)
def test_header_that_takes_memory_is_refused(tmp_path, header):
    path = write(tmp_path / "x", header, data=0)
    with pytest.raises(MalformedError, match=r"more than|header would have"):
        SafetensorsFile(path)


@pytest.mark.parametrize("metadata", [{"a": 1}, {"a": ["b"]}, ["a"], "a", 0])
def test_metadata_that_is_no_text_is_refused(tmp_path, metadata):
    header = {"__metadata__": metadata, "a": tensor(0, 16)}
    with pytest.raises(MalformedError, match="__metadata__"):
        SafetensorsFile(write(tmp_path / "x", header))


def test_header_at_the_bounds_is_read(tmp_path):
    header = {f"t{i}": tensor(0, 0, shape=[0] * 8) for i in range(65_535)}
    header["__metadata__"] = {"text": "[{,:" * 10_000}
    with SafetensorsFile(write(tmp_path / "x", header, data=0)) as file:
        assert len(file.entries) == 65_535


@pytest.mark.parametrize("length", [1 << 63, (16 << 20) + 1, 400])
def test_header_longer_than_the_file(tmp_path, length):
    with pytest.raises(MalformedError, match="header would have"):
        SafetensorsFile(write(tmp_path / "x", {"a": tensor(0, 16)}, length=length))


@pytest.mark.parametrize("metadata", [{"format": "pt"}, None])
def test_header_with_unknown_types_and_metadata_is_read(tmp_path, metadata):
    header = {
        "__metadata__": metadata,
        "b": tensor(0, 8),
        "c": tensor(8, 8, shape=[0, 3]),
        "f8": tensor(8, 16, dtype="F8_E9M9", shape=[8]),
    }
    with SafetensorsFile(write(tmp_path / "x", header)) as file:
        assert set(file.entries) == {"b", "c", "f8"}
        assert (file.read("b").tolist(), file.read("c").shape) == ([0.0, 0.0], (0, 3))

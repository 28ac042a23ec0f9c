"""Which of a repository's files are downloaded."""

import json

import pytest

from model_hub.needed_files import (
    ADAPTER,
    ADAPTER_CONFIG,
    INDEX,
    BrokenIndex,
    adapter_files,
    shards_of,
    text_files,
    weight_files,
)

LISTED = (
    *("README.md", ".gitattributes", "config.json", "generation_config.json", "tokenizer.json"),
    *("tokenizer_config.json", "special_tokens_map.json", "chat_template.jinja", "merges.txt"),
    *("pytorch_model.bin", "pytorch_model.bin.index.json", "model.gguf", "onnx/model.onnx"),
    *("original/consolidated.00.pth", "original/params.json", "tf_model.h5", "flax_model.msgpack"),
    *("consolidated.safetensors", "model-00001-of-00002.safetensors"),
    *("model-00002-of-00002.safetensors", "runs/x.json", "vae/config.json", INDEX),
)
SHARDS = ["model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors"]


def index_of(names):
    return json.dumps({"weight_map": {f"t{i}": name for i, name in enumerate(names)}}).encode()


def test_only_what_is_read():
    assert text_files(LISTED) == [
        *("chat_template.jinja", "config.json", "generation_config.json", INDEX),
        *("special_tokens_map.json", "tokenizer.json", "tokenizer_config.json"),
    ]
    assert weight_files(LISTED, index_of(SHARDS)) == SHARDS


def test_modules_of_sentence_transformers():
    listed = ("modules.json", "1_Pooling/config.json", "2_Dense/model.safetensors", "config.json")
    assert text_files(listed) == ["1_Pooling/config.json", "config.json", "modules.json"]
    assert text_files(listed[1:]) == ["config.json"]


def test_the_single_file_without_an_index():
    assert weight_files(("model.safetensors", "consolidated.safetensors"), None) == [
        "model.safetensors"
    ]
    with pytest.raises(BrokenIndex, match=r"neither model\.safetensors nor"):
        weight_files(("pytorch_model.bin",), None)


def test_a_shard_that_is_not_there():
    with pytest.raises(BrokenIndex, match=r"model-00002-of-00002\.safetensors, which is not"):
        weight_files([SHARDS[0]], index_of(SHARDS))


@pytest.mark.parametrize(
    "content",
    [
        *(b"", b"{}", b"[]", b"null", b'{"weight_map": []}', b'{"weight_map": {}}', b"\xff"),
        *(index_of([name]) for name in ("../x.safetensors", "a/b.safetensors", "/x.safetensors")),
        *(index_of([name]) for name in ("x.bin", ".x.safetensors", "x.safetensors\n", "")),
        b"[" * 100_000,
        b" " * (16 << 20) + b"{}",
    ],
)
def test_an_index_that_names_anything_else_is_refused(content):
    with pytest.raises(BrokenIndex):
        shards_of(content)


def test_adapters():
    names = (ADAPTER_CONFIG, ADAPTER, "optimizer.pt", "README.md")
    assert adapter_files(names) == [ADAPTER_CONFIG, ADAPTER]
    with pytest.raises(BrokenIndex, match=ADAPTER):
        adapter_files((ADAPTER_CONFIG, "adapter_model.bin"))

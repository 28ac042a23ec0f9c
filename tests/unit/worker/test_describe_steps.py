"""The text by which a later start knows that the kernels of its steps are compiled."""

from pathlib import Path
from types import SimpleNamespace
from typing import cast

import pytest
import torch

from worker_daemon import kernels
from worker_daemon.kernels import triton_hash
from worker_daemon.worker.loading import LoadedModel
from worker_daemon.worker.rank_device import OpenedDevice
from worker_daemon.worker.serving import describe_steps


def describe() -> str:
    place = SimpleNamespace(parallel="one rank", device=torch.device("cpu"))
    model = SimpleNamespace(
        resolved=SimpleNamespace(decoder="a decoder"),
        config="a configuration",
        max_model_len=1024,
        attention=SimpleNamespace(name="paged"),
        stage=SimpleNamespace(ops_name="triton"),
    )
    opened = SimpleNamespace(place=place)
    return describe_steps(cast(OpenedDevice, opened), cast(LoadedModel, model))


def test_measured_tiles_and_kernels_change_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(kernels, "__path__", [str(tmp_path), *kernels.__path__])
    (tmp_path / "tuned").mkdir()
    kernel, tiles = tmp_path / "norm.py", tmp_path / "tuned" / "a_device.json"
    texts = []
    for path, content in ((kernel, "one"), (kernel, "two"), (tiles, "{}"), (tiles, "[]")):
        path.write_text(content)
        texts.append(describe())
    assert len(set(texts)) == len(texts)
    assert describe() == texts[-1]


def test_another_triton_changes_it(monkeypatch: pytest.MonkeyPatch) -> None:
    before = describe()
    monkeypatch.setattr(triton_hash, "triton_key", lambda: "of another version")
    assert describe() != before

"""The text by which a later start knows that the kernels of its steps are compiled."""

from pathlib import Path
from types import SimpleNamespace
from typing import cast

import pytest
import torch

from worker_daemon import kernel_compiler
from worker_daemon.kernels import triton_hash
from worker_daemon.models.weights import LoadProgress
from worker_daemon.server.progress import Progress
from worker_daemon.worker.loading import LoadedModel
from worker_daemon.worker.rank_device import OpenedDevice
from worker_daemon.worker.serving import describe_steps
from worker_daemon.worker.stage_loading import _ProgressLine


def describe() -> str:
    place = SimpleNamespace(parallel="one rank", device=torch.device("cpu"))
    model = SimpleNamespace(
        resolved=SimpleNamespace(decoder="a decoder"),
        config="a configuration",
        max_model_len=1024,
        attention=SimpleNamespace(name="paged"),
        stage=SimpleNamespace(ops_name="triton"),
        draft=None,
    )
    opened = SimpleNamespace(place=place)
    return describe_steps(cast(OpenedDevice, opened), cast(LoadedModel, model))


@pytest.mark.parametrize(
    "name",
    ["kernels/norm.py", "kernels/tuned/gpu.json", "contracts/fp8.py", "runner/step_layout.py"],
)
def test_a_change_of_kernels_or_of_what_chooses_them_changes_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    monkeypatch.setattr(kernel_compiler, "__file__", str(tmp_path / "kernel_compiler.py"))
    texts = []
    for content in ("one", "two"):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(content)
        texts.append(describe())
    assert texts[0] != texts[1] == describe()


def test_dangling_links_of_editors_do_not_count(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(kernel_compiler, "__file__", str(tmp_path / "kernel_compiler.py"))
    before = describe()
    (tmp_path / ".#norm.py").symlink_to("user@host.1")
    assert describe() == before


def test_another_triton_changes_it(monkeypatch: pytest.MonkeyPatch) -> None:
    before = describe()
    monkeypatch.setattr(triton_hash, "triton_key", lambda: "of another version")
    assert describe() != before


def test_a_load_says_how_much_of_it_is_done():
    progress = Progress("cpu")
    progress.begin("LoadModel", 60.0, False)
    line = _ProgressLine(progress.set_phase)
    line(LoadProgress(bytes_done=1, bytes_total=4, seconds=0.1))
    assert progress.stamp.done == 0, "it reports once a second"
    line(LoadProgress(bytes_done=3, bytes_total=4, seconds=2.0))
    assert progress.stamp.phase.startswith("LOADING 75%") and progress.stamp.done == 0.75
    progress.idle()
    assert progress.stamp.done == 0

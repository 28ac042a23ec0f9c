"""Where compiled kernels go: state directory, cache directory, environment; never where others may
write."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from rpc_schema.errors import ConfigError
from worker_daemon.settings import (
    ProcessSettings,
    build_settings,
    kernel_cache,
    prepare_kernel_cache,
)

CACHE = "TRITON_CACHE_DIR"


def settings(device: str, state_dir: Path | None = None) -> ProcessSettings:
    given = {"endpoint": "ipc:///a/b", "device": device}
    return build_settings(given | ({"state-dir": str(state_dir)} if state_dir else {}))


def test_state_directory_comes_first_and_is_found_again(tmp_path: Path) -> None:
    environment = {"XDG_CACHE_HOME": str(tmp_path / "cache")}
    first = kernel_cache(tmp_path / "state", environment)
    (first / "kernel").write_text("compiled")
    assert first.parent == tmp_path / "state"
    assert kernel_cache(tmp_path / "state", environment) == first
    assert (first / "kernel").read_text() == "compiled"
    assert not (tmp_path / "cache").exists()


def test_daemons_without_a_state_directory_share_the_user_s_cache(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    chosen = kernel_cache(None, {"XDG_CACHE_HOME": str(tmp_path / "x")})
    assert chosen == tmp_path / "x" / "worker-daemon" / "kernels"
    assert chosen.stat().st_mode & 0o777 == chosen.parent.stat().st_mode & 0o777 == 0o700
    monkeypatch.setenv("HOME", str(tmp_path))
    for ignored in ({}, {"XDG_CACHE_HOME": "relative"}):
        assert kernel_cache(None, ignored) == tmp_path / ".cache" / "worker-daemon" / "kernels"


def test_directory_that_others_may_write_is_refused(tmp_path: Path) -> None:
    for name in ("state", "state/kernels"):
        (tmp_path / name).mkdir(exist_ok=True)
        (tmp_path / name).chmod(0o777)
        with pytest.raises(ConfigError, match="mode 0777"):
            kernel_cache(tmp_path / "state", {})
        (tmp_path / name).chmod(0o700)


def test_link_and_file_are_refused(tmp_path: Path) -> None:
    (tmp_path / "real").mkdir()
    (tmp_path / "link").symlink_to(tmp_path / "real")
    (tmp_path / "file").write_text("")
    with pytest.raises(ConfigError, match="is not a directory"):
        kernel_cache(tmp_path / "link", {})
    with pytest.raises(ConfigError, match="cannot be made"):
        kernel_cache(tmp_path / "file", {})


def test_directory_of_somebody_else_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(os, "geteuid", lambda: 12345)
    with pytest.raises(ConfigError, match="belongs to user"):
        kernel_cache(tmp_path, {})


def test_environment_is_set_for_a_device_and_left_where_it_was_set(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(os, "environ", {"XDG_CACHE_HOME": str(tmp_path)})
    prepare_kernel_cache(settings("cpu"))
    assert CACHE not in os.environ
    prepare_kernel_cache(settings("cuda:0", tmp_path / "state"))
    assert os.environ[CACHE] == str(tmp_path / "state" / "kernels")
    prepare_kernel_cache(settings("cuda:0"))
    assert os.environ[CACHE] == str(tmp_path / "state" / "kernels")


def test_libraries_keep_what_they_compile_in_the_same_directory(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Not where they would, below /tmp."""
    given = {"XDG_CACHE_HOME": str(tmp_path), "CUTE_DSL_CACHE_DIR": str(tmp_path / "given")}
    monkeypatch.setattr(os, "environ", dict(given))
    prepare_kernel_cache(settings("cpu"))
    assert os.environ == given
    prepare_kernel_cache(settings("cuda:0"))
    kept = tmp_path / "worker-daemon" / "kernels" / "flash_attention"
    assert os.environ["FLASH_ATTENTION_CUTE_DSL_CACHE_DIR"] == str(kept)
    assert os.environ["FLASH_ATTENTION_CUTE_DSL_CACHE_ENABLED"] == "1"
    assert os.environ["CUTE_DSL_CACHE_DIR"] == str(tmp_path / "given")
    assert kept.stat().st_mode & 0o777 == 0o700
    assert (tmp_path / "given").is_dir()


@pytest.mark.parametrize(
    ("module", "suspects"),
    [
        ("worker_daemon.cli", ("torch", "numpy", "triton")),
        (
            "worker_daemon.worker.worker",
            ("transformers", "sympy", "torch._dynamo", "torch._inductor", "triton", "networkx"),
        ),
    ],
)
def test_start_imports_nothing_that_it_does_not_need(
    module: str, suspects: tuple[str, ...]
) -> None:
    code = f"import sys, {module}\nprint(*[m for m in {suspects!r} if m in sys.modules])"
    done = subprocess.run([sys.executable, "-c", code], stdout=subprocess.PIPE, check=True)
    assert done.stdout.split() == []

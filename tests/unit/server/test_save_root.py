"""The directory of saved weights: never one that others may write, and none without the option."""

import os
from pathlib import Path

import pytest

from rpc_schema.errors import ConfigError
from worker_daemon.settings import ProcessSettings, build_settings, read_environment

REQUIRED = {"endpoint": "ipc:///a/b", "device": "cpu"}


def settings(root: Path | str) -> ProcessSettings:
    return build_settings({**REQUIRED, "save-root": str(root)})


def test_without_the_option_there_is_none() -> None:
    assert build_settings(REQUIRED).save_root is None


def test_directory_is_made_for_this_user_alone(tmp_path: Path) -> None:
    root = settings(tmp_path / "a" / "saves").save_root
    assert root == tmp_path / "a" / "saves"
    assert root.stat().st_mode & 0o777 == 0o700
    assert settings(root).save_root == root


def test_relative_directory_becomes_absolute(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    assert settings("saves").save_root == tmp_path / "saves"


def test_environment_has_the_option_too() -> None:
    assert read_environment({"WORKER_DAEMON_SAVE_ROOT": "/x"}) == {"save-root": "/x"}


def test_directory_that_is_not_ours_alone_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "open").mkdir()
    (tmp_path / "open").chmod(0o770)
    (tmp_path / "link").symlink_to(tmp_path)
    (tmp_path / "file").write_text("")
    for name, words in (
        ("open", "mode 0770"),
        ("link", "is not a directory"),
        ("file", "cannot be made"),
    ):
        with pytest.raises(ConfigError, match=words) as caught:
            settings(tmp_path / name)
        assert caught.value.field == "save-root"
        assert "--save-root" in str(caught.value)
    monkeypatch.setattr(os, "geteuid", lambda: 12345)
    with pytest.raises(ConfigError, match="belongs to user"):
        settings(tmp_path)

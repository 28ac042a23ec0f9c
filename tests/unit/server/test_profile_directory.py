"""The directory of traces: the option's, otherwise next to a daemon's other files."""

from pathlib import Path

import pytest

from rpc_schema.errors import ConfigError
from worker_daemon.settings import build_settings, profile_directory, read_environment

REQUIRED = {"endpoint": "ipc:///a/b", "device": "cpu"}


def directory(**given: str) -> Path | None:
    return profile_directory(build_settings({**REQUIRED, **given}))


def test_option_comes_first_and_is_made_for_this_user_alone(tmp_path: Path) -> None:
    chosen = directory(**{"profile-dir": str(tmp_path / "x"), "state-dir": str(tmp_path / "s")})
    assert chosen == tmp_path / "x"
    assert chosen.stat().st_mode & 0o777 == 0o700


def test_directory_that_others_may_write_is_refused_at_start(tmp_path: Path) -> None:
    tmp_path.chmod(0o770)
    with pytest.raises(ConfigError, match="mode 0770") as caught:
        directory(**{"profile-dir": str(tmp_path)})
    assert caught.value.field == "profile-dir"


def test_default_lies_in_the_state_directory_or_the_cache_and_is_not_made(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    assert directory(**{"state-dir": str(tmp_path / "s")}) == tmp_path / "s" / "profiles"
    assert directory() == tmp_path / "cache" / "worker-daemon" / "profiles"
    assert list(tmp_path.iterdir()) == []


def test_user_without_a_home_has_none(monkeypatch: pytest.MonkeyPatch) -> None:
    def no_home() -> Path:
        raise RuntimeError("no home directory")

    monkeypatch.delenv("XDG_CACHE_HOME", raising=False)
    monkeypatch.setattr(Path, "home", no_home)
    assert directory() is None


def test_environment_has_the_option_too() -> None:
    assert read_environment({"WORKER_DAEMON_PROFILE_DIR": "/x"}) == {"profile-dir": "/x"}

"""The help of both commands on a terminal of 80 columns, and their versions, installed or not."""

import subprocess
import sys
from importlib import metadata
from pathlib import Path

import msgspec
import pytest
import typer
from typer.testing import CliRunner

from rpc_schema.version import PROTOCOL_VERSION, SOFTWARE_VERSION
from tests.unit.server.driver import DaemonProcess, Driver
from worker_client.__main__ import app as client_app
from worker_daemon.cli import app as daemon_app

ROOT = Path(__file__).parents[2]


def words_of(command, words=()):
    """The words of every command that has options."""
    if not words or not hasattr(command, "commands"):
        yield " ".join(words)
    for name, each in sorted(getattr(command, "commands", {}).items()):
        yield from words_of(each, (*words, name))


COMMANDS = [
    (app, name)
    for app in (client_app, daemon_app)
    for name in words_of(typer.main.get_command(app))
]


@pytest.mark.parametrize(("app", "name"), COMMANDS)
def test_help_names_every_option_at_80_columns(app, name, monkeypatch):
    monkeypatch.setenv("COLUMNS", "80")
    done = CliRunner().invoke(app, [*name.split(), "--help"])
    assert done.exit_code == 0
    command = typer.main.get_command(app)
    for word in name.split():
        command = command.commands[word]
    words = done.output.replace(",", " ").split()
    shown = [parameter for parameter in command.params if not getattr(parameter, "hidden", False)]
    assert shown
    options = [each for each in shown if each.param_type_name == "option"]
    assert {option for parameter in options for option in parameter.opts} <= set(words)
    for environment in [parameter.envvar for parameter in shown if parameter.envvar]:
        assert any(environment in word for word in words)
    assert max(map(len, done.output.splitlines())) <= 80
    summaries = done.output.partition("Commands:")[2].splitlines()
    assert "…" not in done.output and not [line for line in summaries if line.endswith("...")]


@pytest.mark.parametrize(
    ("app", "name"), [(client_app, "worker-client"), (daemon_app, "worker-daemon")]
)
def test_version_names_package_and_protocol(app, name):
    done = CliRunner().invoke(app, ["--version"])
    assert done.output == f"{name} {SOFTWARE_VERSION}, protocol {PROTOCOL_VERSION}\n"
    assert metadata.version("worker-daemon") == SOFTWARE_VERSION


def test_source_tree_that_is_not_installed_serves(tmp_path, monkeypatch):
    packages = tmp_path / "packages"
    packages.mkdir()
    for path in Path(msgspec.__file__).parents[1].iterdir():
        if "worker_daemon" not in path.name and path.suffix != ".pth":
            (packages / path.name).symlink_to(path)
    monkeypatch.setenv("PYTHONPATH", f"{ROOT}:{ROOT / 'client'}:{packages}")
    python = (sys.executable, "-S")  # without the .pth files by which we are installed
    missing = "from importlib.metadata import version; version('worker-daemon')"
    assert subprocess.run([*python, "-c", missing], capture_output=True, check=False).returncode
    serve = ("-m", "tests.unit.server.fake_serve", "serve", "--device", "cpu")
    daemon = DaemonProcess(tmp_path / "d", serve=(*python, *serve))
    try:
        driver = Driver(daemon.endpoint)
        assert driver.hello().software == f"worker-daemon {SOFTWARE_VERSION}"
        driver.close()
    finally:
        daemon.stop()

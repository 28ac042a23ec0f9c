"""`config show` of both commands: each setting's value and origin, and unknown keys."""

import math
import tomllib

import pytest
import typer
from typer.testing import CliRunner

from worker_client.__main__ import app as client_app
from worker_client.errors import ClientConfigError
from worker_daemon.cli import app as daemon_app
from worker_daemon.settings import KEYS, build_settings
from worker_host.exit_codes import ExitCode


def run(app, *words):
    return CliRunner().invoke(app, ["config", "show", *map(str, words)], catch_exceptions=False)


def lines_of(done):
    assert done.exit_code == 0, done.output
    pairs = [line.removeprefix("# ").partition("  # ") for line in done.stdout.splitlines()]
    return {text.split(" = ")[0]: (text, origin) for text, _, origin in pairs}


def test_daemon_shows_where_each_value_comes_from(tmp_path, monkeypatch):
    file = tmp_path / "d.toml"
    file.write_text('device = "cpu"\nlog-level = "debug"\nupload-memory-bytes = 7\n')
    monkeypatch.setenv("WORKER_DAEMON_LOG_LEVEL", "warning")
    monkeypatch.setenv("WORKER_DAEMON_LORA_ROOT", "/a:/b")
    place = tmp_path / "made-by-none"
    words = ("--config", file, "--save-root", place, "--endpoint", f"ipc://{place}/w")
    done = run(daemon_app, *words, "--share-gpu")
    shown = lines_of(done)
    assert list(shown) == list(KEYS)
    assert shown["endpoint"] == (f'endpoint = "ipc://{place}/w"', "argument")
    assert shown["share-gpu"] == ("share-gpu = true", "argument")
    assert shown["device"] == ('device = "cpu"', f"file {file}")
    assert shown["log-level"] == ('log-level = "warning"', "environment")
    assert shown["lora-root"] == ('lora-root = ["/a", "/b"]', "environment")
    assert shown["log-format"] == ('log-format = "text"', "default")
    assert shown["metrics-listen"] == ("metrics-listen", "default: none")
    assert not place.exists()


def test_what_the_daemon_shows_is_a_configuration_file(tmp_path, monkeypatch):
    """Values that are defaults by the show are those of the settings."""
    monkeypatch.chdir(tmp_path)
    words = ("--endpoint", "ipc:///x/y", "--device", "cpu")
    shown = build_settings(tomllib.loads(run(daemon_app, *words).stdout))
    assert shown == build_settings({"endpoint": "ipc:///x/y", "device": "cpu"})


def test_daemon_names_the_nearest_key(tmp_path):
    file = tmp_path / "d.toml"
    file.write_text("log_levle = 3\n")
    done = run(daemon_app, "--config", file)
    assert done.exit_code == ExitCode.CONFIG
    assert "log_levle" in done.stderr and "did you mean log-level?" in done.stderr


def test_client_shows_where_each_value_comes_from(tmp_path, monkeypatch):
    file = tmp_path / "c.toml"
    file.write_text("max_num_seqs = 3\nblock_size = 8\n")
    monkeypatch.setenv("WORKER_CLIENT_BLOCK_SIZE", "32")
    monkeypatch.setenv("WORKER_CLIENT_API_KEY", "a-secret-key")
    monkeypatch.setenv("WORKER_CLIENT_MAX_LORA", "4")
    done = run(client_app, "serve", "--config", file, "--dtype", "float32", "--lora", "x")
    shown = lines_of(done)
    assert shown["max_num_seqs"] == ("max_num_seqs = 3", f"file {file}")
    assert shown["block_size"] == ("block_size = 32", "environment")
    assert shown["dtype"] == ('dtype = "float32"', "argument")
    assert shown["lora"] == ('lora = ["x"]', "argument")
    assert shown["port"] == ("port = 8000", "default")
    assert shown["model"] == ("model", "default")
    assert shown["api_key"] == ('api_key = "(not shown)"', "environment")
    assert "a-secret-key" not in done.output
    command = typer.main.get_command(client_app).commands["serve"]
    names = {parameter.name for parameter in command.params}
    assert names <= shown.keys()
    remark = "WORKER_CLIENT_MAX_LORA is set, and no option has it; did you mean "
    assert remark + "WORKER_CLIENT_MAX_LORAS?" in done.output


def test_client_shows_the_defaults_of_a_checkpoint(tmp_path):
    file = tmp_path / "generation_config.json"
    file.write_text('{"temperature": 0.6, "top_k": 20, "eos_token_id": 2}')
    shown = lines_of(run(client_app, "serve", "--model", tmp_path))
    assert shown["generation_config"] == ('generation_config = "auto"', "default")
    assert shown["temperature of requests"][1] == f"file {file}"
    assert shown["top_k of requests"][0] == "top_k of requests = 20"
    words = ("serve", "--model", tmp_path, "--generation-config", "none")
    assert not any("of requests" in name for name in lines_of(run(client_app, *words)))


def test_client_names_the_nearest_key_and_command(tmp_path):
    file = tmp_path / "c.toml"
    file.write_text("max-num-seq = 3\n")
    done = run(client_app, "bench", "--config", file)
    assert done.exit_code == 2 and "did you mean max_num_seqs?" in done.output
    (rate,) = (line for line in run(client_app, "bench").output.splitlines() if "_rate" in line)
    assert tomllib.loads(rate) == {"request_rate": math.inf}
    with pytest.raises(ClientConfigError, match="use serve"):
        run(client_app, "serv")

"""`worker-daemon plan` as a user runs it."""

import json
import subprocess
import sys
from pathlib import Path

from typer.testing import CliRunner

from tests.support.command_line import DAEMON, environment
from tests.support.hub_server import HubServer
from tests.support.waiting import PATIENCE_S
from worker_daemon.cli import app

MODEL = ("--model", str(Path(__file__).parents[3] / "benchmarks" / "models" / "llama-8b"))
H200_BYTES = 150_109_880_320


def run_plan(directory, *words):
    """In a separate process."""
    return subprocess.run(
        [*DAEMON, "plan", *words],
        capture_output=True,
        text=True,
        timeout=PATIENCE_S,
        env=environment(directory),
        check=False,
    )


def test_json_names_every_rank(tmp_path):
    sizes = ("--pipeline-parallel-size", "2", "--layer-partition", "17,15")
    done = run_plan(tmp_path, *MODEL, *sizes, "--memory-bytes", str(H200_BYTES), "--json")
    assert done.returncode == 0, done.stderr
    plan = json.loads(done.stdout)
    assert [rank["num_layers"] for rank in plan["ranks"]] == [17, 15]
    assert plan["num_blocks"] == plan["ranks"][0]["num_blocks"]
    assert plan["max_model_len"] == 131072
    assert plan["requested_bytes"] == 135_098_892_288


def test_a_length_of_minus_one_is_the_longest_that_fits(monkeypatch):
    """In this process, without changing its logs and environment."""
    monkeypatch.setattr("worker_daemon.cli.configure_logs", lambda _: None)
    monkeypatch.setattr("worker_daemon.cli.prepare_environment", lambda: None)
    small = ("--memory-bytes", str(22 * 10**9), "--json")
    whole, fitted = (
        json.loads(CliRunner().invoke(app, ["plan", *MODEL, *small, *more]).stdout)
        for more in ((), ("--max-model-len", "-1"))
    )
    assert not whole["max_model_len_fits"]
    assert fitted["max_model_len_fits"]
    assert fitted["max_model_len"] == fitted["longest_model_len"] == whole["longest_model_len"]


def test_options_of_experts_that_move(monkeypatch, caplog):
    """Their slots and their spare memory count; a number of copies that does not divide is
    refused."""
    monkeypatch.setattr("worker_daemon.cli.configure_logs", lambda _: None)
    monkeypatch.setattr("worker_daemon.cli.prepare_environment", lambda: None)
    model = MODEL[1].replace(Path(MODEL[1]).name, "qwen3-30b-a3b")
    words = ["plan", "--model", model, "--memory-bytes", str(H200_BYTES), "--json"]
    words += ["--tensor-parallel-size", "2", "--enable-expert-parallel"]
    at_rest, moving = (
        json.loads(CliRunner().invoke(app, [*words, *more]).stdout)["ranks"][0]["weights_bytes"]
        for more in ((), ("--enable-eplb", "--num-redundant-experts", "16"))
    )
    expert_bytes = 2 * 3 * 2048 * 768
    assert moving - at_rest == (48 * 8 + 72) * expert_bytes
    refused = CliRunner().invoke(app, [*words, "--enable-eplb", "--num-redundant-experts", "3"])
    assert refused.exit_code == 78
    assert "num_redundant_experts = 3" in caplog.text


def test_a_repository_by_its_name(tmp_path, monkeypatch):
    """Its small files are downloaded, and the plan is that of the directory."""
    hub = HubServer()
    repository = hub.repository("org/name")
    weights = {"model.safetensors": b"not needed"}
    commit = repository.commit(Path(MODEL[1]), **weights)
    monkeypatch.setenv("HF_ENDPOINT", hub.url)
    monkeypatch.setenv("HF_HOME", str(tmp_path / "home"))
    monkeypatch.delenv("HF_HUB_CACHE", raising=False)
    monkeypatch.setattr("worker_daemon.cli.configure_logs", lambda _: None)
    monkeypatch.setattr("worker_daemon.cli.prepare_environment", lambda: None)
    size = ("--memory-bytes", str(H200_BYTES), "--json")
    try:
        plans = [
            CliRunner().invoke(app, ["plan", "--model", model, *size])
            for model in (MODEL[1], "org/name", f"org/name@{commit}", "org/absent")
        ]
    finally:
        hub.close()
    assert plans[0].stdout == plans[1].stdout == plans[2].stdout
    assert (
        json.loads(plans[0].stdout)["num_blocks"] > 0 and not hub.downloaded()["model.safetensors"]
    )
    assert plans[3].exit_code == 65


def test_a_wrong_setting_is_one_line_and_an_exit_code(tmp_path):
    done = run_plan(tmp_path, *MODEL, "--device", "cpu")
    assert done.returncode == 78
    assert done.stdout == ""
    assert "--memory-bytes" in done.stderr
    assert len(done.stderr.splitlines()) == 1


def test_serve_does_not_wait_for_what_a_plan_needs():
    code = "import sys, worker_daemon.cli; print({'torch', 'pynvml'} & set(sys.modules))"
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=PATIENCE_S
    )
    assert done.stdout.strip() == "set()"


def test_an_encoder_has_no_kv_cache(tmp_path):
    config = {
        "architectures": ["BertModel"],
        "vocab_size": 1000,
        "hidden_size": 64,
        "intermediate_size": 128,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "max_position_embeddings": 128,
    }
    (tmp_path / "config.json").write_text(json.dumps(config))
    words = ["plan", "--model", str(tmp_path), "--memory-bytes", "1000000000"]
    shown = CliRunner().invoke(app, words)
    assert shown.exit_code == 0, shown.output
    assert "no KV cache" in shown.output
    assert "blocks of" not in shown.output


def test_an_empty_partition_is_refused(tmp_path):
    done = CliRunner().invoke(
        app, ["plan", *MODEL, "--layer-partition", "", "--memory-bytes", str(H200_BYTES)]
    )
    assert done.exit_code != 0
    assert "layer_partition" in done.output

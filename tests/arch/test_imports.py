"""Checks which modules importing a package loads, in fresh interpreters."""

import json
import subprocess
import sys

from tests.support.waiting import PATIENCE_S


def loaded_by(statement, *suspects):
    """Return the suspects that a fresh interpreter has loaded after the statement."""
    code = f"import sys\n{statement}\nprint(*[m for m in {suspects!r} if m in sys.modules])"
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=PATIENCE_S
    )
    return done.stdout.split()


def import_all(package, leave_out=()):
    """Return a statement that imports every module of a package except __main__, and those whose
    names begin with one of leave_out."""
    return (
        "import importlib, pkgutil\n"
        f"import {package}\n"
        f"for found in pkgutil.walk_packages({package}.__path__, '{package}.'):\n"
        f"    if not found.name.startswith({leave_out!r}) and '__main__' not in found.name:\n"
        "        importlib.import_module(found.name)\n"
    )


def test_rpc_schema_needs_msgspec_and_the_standard_library_only():
    suspects = (
        "torch",
        "zmq",
        "numpy",
        "triton",
        "uvloop",
        "worker_client",
        "worker_daemon",
        "worker_host",
        "rendezvous",
        "msgspec",
    )
    assert loaded_by(import_all("rpc_schema"), *suspects) == ["msgspec"]


def test_the_schema_is_messages_their_codec_and_their_errors():
    """Files, sockets and processes are others' business."""
    machinery = ("socket", "selectors", "subprocess", "ctypes", "pwd", "grp", "hmac", "secrets")
    assert loaded_by(import_all("rpc_schema"), *machinery) == []


def test_a_rendezvous_needs_the_standard_library_only():
    suspects = ("msgspec", "zmq", "torch", "numpy", "rpc_schema", "worker_host", "rendezvous.store")
    assert loaded_by(import_all("rendezvous"), *suspects) == ["rendezvous.store"]


def test_only_exporters_of_metrics_bring_their_library():
    daemon = "import worker_daemon.cli, worker_daemon.server.assembly"
    assert loaded_by(daemon, "prometheus_client", "torch") == []
    assert loaded_by("import worker_host.exposition", "prometheus_client") == ["prometheus_client"]


def test_client_brings_neither_torch_nor_the_daemon():
    suspects = ("torch", "triton", "safetensors", "uvloop", "worker_daemon", "zmq")
    apart = ("worker_client.trainer.", "worker_client.vllm.hooks.")
    assert loaded_by(import_all("worker_client", apart), *suspects) == ["zmq"]


def test_commands_do_without_the_servers_packages():
    suspects = ("fastapi", "starlette", "pydantic", "uvicorn", "worker_client.service.settings")
    found = loaded_by("import worker_client.__main__", *suspects)
    assert found == ["worker_client.service.settings"]


PROBE_MODULES = {
    "rendezvous": "borrowed_sockets",
    "rpc_schema": "base control error_replies errors frames health lease roles version",
    "worker_client": "cli errors shown_values wire",
    "worker_client.cli": "command_errors probe",
    "worker_client.wire": "control_channel endpoint health_client ipc_owner keys listener processes"
    " sockets",
    "worker_host": "exit_codes key_files plain_text safe_paths",
}


def test_a_health_probe_brings_a_part_of_the_client_and_no_framework():
    """Supervisors start it every few seconds, beside the daemon."""
    ours = {
        f"{package}.{name}" for package, names in PROBE_MODULES.items() for name in names.split()
    }
    code = "import sys, worker_client.cli.probe\nprint(*sys.modules)"
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=PATIENCE_S
    )
    loaded = set(done.stdout.split())
    assert {
        name for name in loaded if name.startswith(tuple(f"{top}." for top in PROBE_MODULES))
    } <= ours
    tops = {name.partition(".")[0] for name in loaded}
    assert {"zmq", "msgspec"} <= tops
    heavy = {"asyncio", "click", "concurrent", "logging", "numpy", "rich", "ssl", "subprocess"}
    assert not tops & (heavy | {"tokenizers", "typer"})


def test_the_trainers_side_brings_torch_alone():
    suspects = ("torch", "safetensors", "uvloop", "worker_daemon")
    assert loaded_by(import_all("worker_client.trainer"), *suspects) == ["torch"]


def test_numeric_packages_bring_no_wire_and_no_socket():
    suspects = (
        "rpc_schema.base",
        "rpc_schema.codec",
        "msgspec",
        "zmq",
        "uvloop",
        "worker_client",
        "torch",
    )
    packages = ("models", "layers", "distributed", "device")
    statement = "".join(import_all(f"worker_daemon.{package}") for package in packages)
    assert loaded_by(statement, *suspects) == ["torch"]


SERVING = """
from pathlib import Path
from benchmarks.stage_driver import StageDriver
driver = StageDriver(Path({model!r}), "cpu", 64, "float32", num_blocks=64)
driver.start()
driver.admit(num_requests=2, prompt_len=9, num_more=4)
"""


def test_a_worker_that_serves_on_the_cpu_has_loaded_neither_torchs_compiler_nor_triton(tmp_path):
    """Either takes seconds of every start. A single operation on the meta device imports the
    compiler."""
    config = {
        "architectures": ["Qwen3ForCausalLM"],
        "model_type": "qwen3",
        "vocab_size": 1200,
        "hidden_size": 32,
        "intermediate_size": 64,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 8,
        "max_position_embeddings": 64,
        "rms_norm_eps": 1e-6,
        "rope_theta": 10000.0,
        "hidden_act": "silu",
        "tie_word_embeddings": True,
        "torch_dtype": "float32",
    }
    (tmp_path / "config.json").write_text(json.dumps(config))
    suspects = (
        "torch._dynamo",
        "torch._inductor",
        "torch.fx.experimental.symbolic_shapes",
        "triton",
    )
    assert loaded_by(
        SERVING.format(model=str(tmp_path)), *suspects, "worker_daemon.worker.worker"
    ) == ["worker_daemon.worker.worker"]


def test_the_lifecycle_table_is_pure():
    assert loaded_by("import worker_daemon.server.lifecycle", "torch", "asyncio") == []

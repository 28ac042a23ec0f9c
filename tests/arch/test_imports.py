"""What importing a package brings with it: fresh interpreters, because this one has everything."""

import subprocess
import sys

import pytest


def loaded_by(statement, *suspects):
    """Which of the suspects a fresh interpreter has loaded after the statement."""
    code = f"import sys\n{statement}\nprint(*[m for m in {suspects!r} if m in sys.modules])"
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=60
    )
    return done.stdout.split()


def import_all(package, leave_out="no such module"):
    """A statement that imports every module of a package, its __main__ apart."""
    return (
        "import importlib, pkgutil\n"
        f"import {package}\n"
        f"for found in pkgutil.walk_packages({package}.__path__, '{package}.'):\n"
        f"    if not found.name.endswith('__main__') and {leave_out!r} not in found.name:\n"
        "        importlib.import_module(found.name)\n"
    )


def test_rpc_schema_needs_msgspec_and_the_standard_library_only():
    suspects = ("torch", "zmq", "numpy", "triton", "uvloop", "client", "worker_daemon", "msgspec")
    assert loaded_by(import_all("rpc_schema"), *suspects) == ["msgspec"]


def test_client_brings_neither_torch_nor_the_daemon():
    suspects = ("torch", "triton", "safetensors", "uvloop", "worker_daemon", "zmq")
    assert loaded_by(import_all("client", leave_out="client.trainer."), *suspects) == ["zmq"]


def test_the_trainers_side_brings_torch_alone():
    suspects = ("torch", "safetensors", "uvloop", "worker_daemon")
    assert loaded_by(import_all("client.trainer"), *suspects) == ["torch"]


@pytest.mark.parametrize("package", ["models", "layers", "distributed", "device"])
def test_numeric_packages_bring_no_wire_and_no_socket(package):
    suspects = ("rpc_schema", "msgspec", "zmq", "uvloop", "client", "torch")
    assert loaded_by(import_all(f"worker_daemon.{package}"), *suspects) == ["torch"]


def test_the_lifecycle_table_is_pure():
    assert loaded_by("import worker_daemon.server.lifecycle", "torch", "asyncio") == []

"""`worker-client serve` before anything starts: what it refuses, and where it places daemons."""

import contextlib
import socket
from pathlib import Path
from typing import ClassVar

import pytest
from msgspec.structs import replace
from typer.testing import CliRunner

from worker_client.__main__ import app
from worker_client.cli import serve as command
from worker_client.cli.demo_model import make_demo_model
from worker_client.errors import ClientConfigError, LaunchError, WorkerDied
from worker_client.service import server
from worker_client.service.engine import Engine
from worker_client.service.key_files import read_keys_of


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    path = tmp_path_factory.mktemp("models") / "named"
    make_demo_model(path)
    return path


@pytest.fixture
def served(monkeypatch):
    """What the command would serve: (group, settings), one for each call."""
    found = []
    monkeypatch.setattr(server, "serve", lambda *given: found.append(given))
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    for name in ("API_KEY", "API_KEY_FILE", "ADMIN_KEY", "ADMIN_KEY_FILE"):
        monkeypatch.delenv(f"WORKER_CLIENT_{name}", raising=False)
    return found


def run(*words):
    return CliRunner().invoke(app, ["serve", *map(str, words)])


def test_every_wrong_option_is_named_with_the_fix_and_no_key_is_shown(
    model, served, tmp_path, monkeypatch
):
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    keys, empty = tmp_path / "keys", tmp_path / "empty"
    keys.write_text("a-secret-key\n")
    keys.chmod(0o644)
    empty.touch(0o600)
    for words, field in (
        (("--model", tmp_path / "none"), "model"),
        (("--model", model, "--device", "cuda"), "device"),
        (("--model", model, "--device", "cpu", "--gpus", "0"), "gpus"),
        (("--model", model, "--device", "cuda", "--gpus", "0,0"), "gpus"),
        (("--model", model, "--device", "cuda", "--gpus", "x"), "gpus"),
        (
            ("--model", model, "--device", "cuda", "--gpus", "0,1,2", "--data-parallel-size", 2),
            "gpus",
        ),
        (("--model", model, "--device", "cpu", "--data-parallel-size", 10**20), "parallel"),
        (("--model", model, "--gpus", "0", "--endpoints", "ipc:///a/b"), "gpus"),
        (("--model", model, "--endpoints", "ipc:///a/b,ipc:///a/c"), "endpoints"),
        (("--model", model, "--endpoints", "tcp://127.0.0.1:5"), "endpoint"),
        (("--model", model, "--endpoints", "ipc:///a/b", "--data-parallel-size", 2), "endpoints"),
        (("--model", model, "--generation-config", "x"), "generation_config"),
        (("--model", model, "--eplb-step-interval", 5), "eplb_step_interval"),
        (("--model", model, "--api-key", "a-short"), "api_key"),
        (("--model", model, "--api-key", "with a space"), "api_key"),
        (("--model", model, "--admin-key-file", keys), "admin_key_file"),
        (("--model", model, "--api-key-file", empty), "api_key_file"),
        (("--model", model, "--api-key-file", tmp_path), "api_key_file"),
    ):
        done = run(*words)
        assert isinstance(done.exception, ClientConfigError), (words, done)
        assert done.exception.field == field and done.exception.fix, done.exception
        assert not any(key in str(done.exception) for key in ("a-secret", "a-short", "a space"))
    assert not served
    assert run("--model", model, "--prompt", "x").exit_code == 2, "it is an option of runs"


APART = ("--prefill-endpoints", "ipc:///a/p,ipc:///a/q", "--kv-host-memory-bytes", 1 << 20)
"""Two daemons that compute prompts, and host memory for them."""


@pytest.mark.parametrize(
    ("words", "field"),
    [
        (("--prefill-endpoints", ","), "prefill_endpoints"),
        (("--prefill-tensor-parallel-size", 2), "prefill_tensor_parallel_size"),
        (("--prefill-host", "127.0.0.1"), "prefill_host"),
        (("--prefill-timeout", 3), "prefill_timeout"),
        ((*APART, "--prefill-pipeline-parallel-size", 3), "prefill_endpoints"),
        ((*APART, "--prefill-tensor-parallel-size", 1), "prefill_endpoints"),
        ((*APART, "--endpoints", "ipc:///a/q"), "prefill_endpoints"),
        ((*APART, "--prefill-endpoints", "ipc:///a/p,ipc:///a/p"), "prefill_endpoints"),
        ((*APART, "--kv-host-memory-bytes", 0), "kv_host_memory_bytes"),
        ((*APART, "--prefill-host", "203.0.113.7"), "prefill_host"),
        ((*APART, "--prefill-endpoints", "tcp://10.0.0.1:70"), "endpoint"),
        ((*APART, "--data-parallel-size", 2), "data_parallel_size"),
    ],
)
def test_wrong_options_of_the_prefill_group_are_named(model, served, words, field):
    done = run("--model", model, "--device", "cpu", *words)
    assert isinstance(done.exception, ClientConfigError), (words, done)
    assert done.exception.field == field and done.exception.fix, done.exception
    assert not served


def test_the_prefill_group_has_sizes_of_its_own_and_else_the_same_options(model, served):
    sizes = ("--prefill-pipeline-parallel-size", 2, "--tensor-parallel-size", 1)
    options = ("--max-num-seqs", 7, "--max-loras", 2, "--prefill-timeout", 3)
    options += ("--enable-expert-parallel", "--enable-eplb", "--num-redundant-experts", 2)
    done = run("--model", model, "--device", "cpu", *APART, *sizes, *options)
    assert done.exit_code == 0, done
    ((group, settings),) = served
    other, parallel = settings.prefill.group, settings.prefill.group.config.parallel
    assert (parallel.pipeline_parallel_size, parallel.tensor_parallel_size) == (2, 1)
    assert (other.endpoints, other.devices) == (("ipc:///a/p", "ipc:///a/q"), ())
    assert (settings.prefill.host, settings.prefill.timeout_s) == ("127.0.0.1", 3)
    for part in ("scheduler", "cache", "speculative"):
        assert getattr(other.config, part) == getattr(group.config, part)
    at_rest = replace(group.config.model, enable_eplb=False, num_redundant_experts=0)
    assert other.config.model == at_rest != group.config.model
    assert (group.eplb_step_interval, other.eplb_step_interval) == (3000, None)
    assert (group.config.lora.max_loras, other.config.lora.max_loras) == (2, 0)
    assert run("--model", model, "--device", "cpu").exit_code == 0
    assert served[1][1].prefill is None


def test_the_port_and_the_tokenizer_are_checked_before_daemons_start(model, tmp_path):
    bare = tmp_path / "bare"
    bare.mkdir()
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        for words, field in (
            (("--model", model, "--port", port), "port"),
            (("--model", model, "--port", 0, "--host", "host.invalid"), "port"),
            (("--model", bare, "--port", 0), "model"),
        ):
            done = run(*words, "--device", "cpu")
            assert isinstance(done.exception, ClientConfigError), (words, done)
            assert done.exception.field == field and done.exception.fix


@pytest.mark.parametrize(
    ("words", "visible", "nodes", "sizes", "devices"),
    [
        ((), None, 4, (1, 4), "0123"),
        ((), "1,3", 4, (1, 2), "01"),
        ((), "GPU-a,-1,GPU-b", 4, (1, 1), "0"),
        (("--pipeline-parallel-size", 2), None, 4, (2, 2), "0123"),
        (("--pipeline-parallel-size", 3), None, 4, (3, 1), "012"),
        (("--tensor-parallel-size", 2), None, 4, (1, 2), "01"),
        (("--gpus", "3,1"), None, 4, (1, 2), "31"),
        (("--data-parallel-size", 2), None, 4, (1, 2), "0123"),
        (("--data-parallel-size", 4), None, 4, (1, 1), "0123"),
        (("--data-parallel-size", 3), None, 2, None, "gpus"),
        (("--tensor-parallel-size", 8), None, 4, None, "gpus"),
        (("--pipeline-parallel-size", 2, "--gpus", "0"), None, 4, None, "gpus"),
    ],
)
def test_the_model_is_spread_over_the_gpus(
    model, served, monkeypatch, words, visible, nodes, sizes, devices
):
    """sizes: pipeline and tensor parallel; None: it is refused, `devices` being the field."""
    if visible is not None:
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
    named = [Path(f"/dev/nvidia{number}") for number in range(nodes)]
    monkeypatch.setattr(Path, "glob", lambda *_: iter(named))
    done = run("--model", model, "--device", "cuda", *words)
    if sizes is None:
        assert isinstance(done.exception, ClientConfigError) and done.exception.field == devices
        return
    assert done.exit_code == 0, done
    ((group, _),) = served
    parallel = group.config.parallel
    assert (parallel.pipeline_parallel_size, parallel.tensor_parallel_size) == sizes
    assert group.devices == tuple(f"cuda:{number}" for number in devices)


def test_a_cpu_has_one_daemon_unless_sizes_say_more(model, served):
    run("--model", model, "--device", "cpu")
    run("--model", model, "--device", "cpu", "--pipeline-parallel-size", 2)
    run("--model", model, "--endpoints", "ipc:///a/b", "--generation-config", "none")
    assert [own.generation_config for _, own in served] == ["auto", "auto", "none"]
    assert [group.devices for group, _ in served] == [("cpu",), ("cpu", "cpu"), ()]
    assert [group.endpoints for group, _ in served] == [(), (), ("ipc:///a/b",)]


def test_keys_come_from_the_command_line_variables_and_files(model, served, tmp_path, monkeypatch):
    file = tmp_path / "keys"
    file.write_text("# of the team\n\n  first-key \nsecond-key\n")
    file.chmod(0o640)
    assert read_keys_of("api_key", None, None) == ()
    assert read_keys_of("api_key", "zeroth-key", file) == ("zeroth-key", "first-key", "second-key")
    monkeypatch.setenv("WORKER_CLIENT_API_KEY", "variable-key")
    monkeypatch.setenv("WORKER_CLIENT_ADMIN_KEY_FILE", str(file))
    assert run("--model", model, "--device", "cpu").exit_code == 0
    ((_, settings),) = served
    assert settings.api_keys == ("variable-key",)
    assert settings.admin_keys == ("first-key", "second-key")
    assert "key" not in repr(settings), "logs may have it"


def test_without_its_packages_it_says_what_to_install(model, served, monkeypatch):
    monkeypatch.setattr(command, "PACKAGES", ("a_package_that_nobody_has",))
    error = run("--model", model, "--device", "cpu").exception
    assert isinstance(error, ClientConfigError) and "worker-daemon[service]" in error.fix


class EndedDriver:
    """A driver that ends with its first step."""

    scheduler = None
    busy = True

    class group:
        class loras:
            known: ClassVar = {}

    def step(self):
        raise WorkerDied(0, "ipc:///a/b")

    def run(self):
        return iter(())


@pytest.mark.parametrize(("opens", "error"), [(False, LaunchError), (True, WorkerDied)])
def test_a_start_that_fails_and_a_driver_that_ends_are_the_commands_error(
    model, monkeypatch, opens, error
):
    """A supervisor starts it again; meanwhile nothing listens at its port."""

    @contextlib.contextmanager
    def open_driver(self):
        if not opens:
            raise LaunchError("it did not start", exit_code=1, log_tail="")
        yield EndedDriver()

    monkeypatch.setattr(Engine, "_open_driver", open_driver)
    monkeypatch.setattr(server.sys, "setswitchinterval", lambda _: None)
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    done = run("--model", model, "--device", "cpu", "--port", port)
    assert isinstance(done.exception, error), done
    with pytest.raises(ConnectionRefusedError):
        socket.create_connection(("127.0.0.1", port))

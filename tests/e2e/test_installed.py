"""The wheel in clean environments, for drivers without torch and for daemons, used from an
application's directory with its own client.py."""

import importlib.util
import json
import re
import shlex
import shutil
import subprocess
from pathlib import Path

import pytest

from rpc_schema.version import SOFTWARE_VERSION
from tests.support.command_line import short_directory, wait_for_daemons
from tests.support.installed import Installed, clean_environment
from tests.support.waiting import PATIENCE_S
from tests.support.wheel import build_wheel
from worker_client.cli.demo_model import SENTENCES
from worker_host.exit_codes import ExitCode

pytestmark = pytest.mark.skipif(
    importlib.util.find_spec("pip") is None, reason="pip, which installs the wheel, is not here"
)

WORKERS_MODULES = ("torch", "triton", "safetensors", "uvloop", "pynvml", "llguidance", "jinja2")
INSTALL = 'pip install "worker-daemon[worker]"'
IMPORT_ALL = """
import importlib, importlib.util, pkgutil, sys
import rendezvous, rpc_schema, worker_client, worker_host
NEED_MORE = (
    "__main__",
    "structured.mask_process",
    "structured.text_tokens",
    "chat_template",
    "template_process",
    "worker_host.exposition",
)
for package in (rendezvous, rpc_schema, worker_client, worker_host):
    for module in pkgutil.walk_packages(package.__path__, package.__name__ + "."):
        if ".trainer" in module.name or ".vllm.hooks" in module.name:
            continue
        if module.name.endswith(NEED_MORE):
            continue
        if ".service." in module.name and not module.name.endswith(("launch", "settings")):
            continue
        importlib.import_module(module.name)
import worker_client.driver, worker_client.worker_group, worker_client.scheduler
from rpc_schema.structured import StructuredOutput
from worker_client.structured.opening import open_grammars
refusal = open_grammars(None, 9, [1]).compile(StructuredOutput(kind="regex", text="a")).exception()
assert "worker-daemon[structured]" in refusal.fix
try:
    import worker_client.inputs.chat_template
except ImportError as error:
    assert "worker-daemon[chat]" in str(error)
print(*[name for name in sys.argv[1:] if importlib.util.find_spec(name)])
print(worker_client.__file__)
"""


@pytest.fixture(scope="module")
def wheel(tmp_path_factory):
    return build_wheel(tmp_path_factory.mktemp("source"))


@pytest.fixture(scope="module")
def driver_side(wheel, tmp_path_factory):
    """An environment with what `pip install worker-daemon` brings."""
    return Installed(tmp_path_factory.mktemp("driver"), wheel)


@pytest.fixture(scope="module")
def daemon_side(wheel, tmp_path_factory):
    """An environment with what `pip install "worker-daemon[worker]"` brings."""
    return Installed(tmp_path_factory.mktemp("daemon"), wheel, "worker")


@pytest.fixture
def application():
    """The directory of an application with its own client.py, which only it may import."""
    path = short_directory()
    (path / "client.py").write_text("raise SystemExit('this client.py is the application\\'s')\n")
    yield path
    shutil.rmtree(path)


def test_the_drivers_library_imports_without_the_workers_packages(driver_side, application):
    done = driver_side.run(application, "python", "-c", IMPORT_ALL, *WORKERS_MODULES)
    assert done.returncode == 0, done.stderr
    found, file = done.stdout.splitlines()
    assert not found
    assert Path(file).is_relative_to(driver_side.programs.parent)


@pytest.mark.parametrize("name", ["worker-client", "worker-daemon"])
def test_both_commands_say_what_they_are(driver_side, application, name):
    done = driver_side.run(application, name, "--version")
    assert done.stdout.startswith(f"{name} {SOFTWARE_VERSION},") and not done.stderr
    done = driver_side.run(application, name, "--help")
    assert "Commands:" in done.stdout and not done.stderr


@pytest.mark.parametrize(
    "command",
    [
        ("worker-client", "status"),
        ("python", "-m", "worker_client", "status"),
        ("worker-probe", "live"),
    ],
)
def test_an_endpoint_where_nobody_listens_is_an_error_of_one_line(
    driver_side, application, command
):
    missing = f"ipc://{application}/w0"
    done = driver_side.run(application, *command, "--endpoints", missing)
    assert done.returncode == 2 and not done.stdout
    (line,) = done.stderr.splitlines()
    assert line.startswith("error: NothingListens:") and missing in line


@pytest.mark.parametrize("words", [("serve", "--device", "cpu"), ("plan", "--model", ".")])
def test_a_worker_without_its_extra_says_what_to_install(driver_side, application, words):
    done = driver_side.run(application, "worker-daemon", *words)
    assert done.returncode == ExitCode.CONFIG
    (line,) = done.stderr.splitlines()
    assert INSTALL in line and all(name in line for name in ("torch", "uvloop"))


def test_a_server_without_its_extra_says_what_to_install(driver_side, application):
    done = driver_side.run(application, "worker-client", "serve", "--model", application)
    assert done.returncode == 2 and not done.stdout
    (line,) = done.stderr.splitlines()
    assert 'pip install "worker-daemon[service]"' in line and "fastapi" in line


def test_a_trainers_side_without_torch_says_what_to_install(driver_side, application):
    done = driver_side.run(application, "python", "-c", "import worker_client.trainer.sender")
    assert done.returncode == 1
    assert done.stderr.splitlines()[-1].startswith("ImportError: ") and INSTALL in done.stderr


def test_keys_are_made_without_the_extra(driver_side, application):
    done = driver_side.run(application, "worker-daemon", "keygen", "--out", application / "own")
    assert done.returncode == 0, done.stderr
    public = json.loads((application / "own.pub").read_text())
    assert public["public_key"] == done.stdout.strip()


def test_a_driver_without_torch_drives_an_installed_daemon(
    driver_side, daemon_side, application, checkpoint
):
    model = checkpoint().path
    endpoint = f"ipc://{application}/w0"
    requests = application / "in.jsonl"
    results = application / "out.jsonl"
    requests.write_text(json.dumps({"prompt_token_ids": [1, 2, 3], "max_tokens": 4}) + "\n")
    at = ("--endpoints", endpoint)
    serve = ("serve", "--endpoint", endpoint, "--device", "cpu", "--model-root", model.parent)
    with subprocess.Popen(
        [str(daemon_side.programs / "worker-daemon"), *map(str, serve)],
        cwd=application,
        env=clean_environment() | {"XDG_CACHE_HOME": str(application)},
    ) as daemon:
        try:
            wait_for_daemons([endpoint], [daemon])
            files = ("--model", model, "--input", requests, "--output", results)
            words = ("generate", *at, *files, "--num-gpu-blocks", "64")
            done = driver_side.run(application, "worker-client", *words)
            assert done.returncode == 0, done.stderr
            assert len(json.loads(results.read_text())["token_ids"]) == 4
            for side in (driver_side, daemon_side):
                done = side.run(application, "worker-client", "status", *at)
                assert done.returncode == 0 and "READY" in done.stdout, done.stderr
            done = driver_side.run(application, "worker-client", "shutdown", *at)
            assert done.returncode == 0, done.stderr
            assert daemon.wait(PATIENCE_S) == ExitCode.OK
        finally:
            daemon.kill()


def test_demo_of_the_wheel_shows_the_same_tokens_after_each_kill(daemon_side, application):
    """With a model that it makes itself, without what only tests have installed."""
    words = ("--device", "cpu", "--num-requests", 18, "--max-tokens", 20)
    done = daemon_side.run(application, "worker-client", "demo", *words)
    assert (done.returncode, done.stderr) == (0, "")
    lines = done.stdout.splitlines()
    shown, commands = lines[: (end := lines.index("what to try next"))], lines[end + 1 :]
    assert max(map(len, shown)) <= 79 and "\x1b" not in done.stdout
    assert shown.count("the same tokens in each run") == 1
    digests = re.findall(r"360 of 18 requests, SHA-256 (\w{12})", done.stdout)
    assert len(digests) == 3 and len(set(digests)) == 1
    for sentence in SENTENCES.splitlines()[:2]:
        assert any(line.startswith(f"  {sentence[:40]}") for line in shown)
    for victim in ("driver", "rank 1"):
        (later,) = re.findall(
            rf"^{victim} killed at .* s, next token (.*) s later$", done.stdout, re.M
        )
        assert float(later) > 0 and any(f"{later}  {victim}: " in line for line in shown)
    kept = re.search(r"adopted (\d+) .*; (\d+) had waited", done.stdout)
    assert 0 < int(kept[1]) <= 16 and int(kept[1]) + int(kept[2]) <= 18
    for command in commands[1:]:
        program, name, *options = shlex.split(command)
        assert Path(program).name == "worker-client"
        help_ = daemon_side.run(application, "worker-client", name, "--help").stdout
        assert all(option in help_ for option in options if option.startswith("--"))

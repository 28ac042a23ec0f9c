"""The units of docker/systemd under a real systemd: supervision of a group."""

import time
from pathlib import Path

import pytest

from tests.support.systemd_host import SystemdHost

ENDPOINTS = ",".join(f"ipc:///run/worker-daemon/{index}/worker" for index in range(2))
GENERATE = (
    f"generate --endpoints {ENDPOINTS} --model /srv/models/small --pipeline-parallel-size 2 "
    "--dtype float32 --input /srv/models/in.jsonl --output /tmp/out.jsonl"
)
LINE = '{"prompt_token_ids": [5, 6, 7], "max_tokens": 12, "ignore_eos": true}'

pytestmark = [
    pytest.mark.exhaustive,
    pytest.mark.skipif(bool(SystemdHost.lacks()), reason=f"needs {SystemdHost.lacks()}"),
]


@pytest.fixture(scope="module")
def host(checkpoint, tmp_path_factory):
    """Two daemons on the CPU, started by their target."""
    scratch: Path = tmp_path_factory.mktemp("systemd")
    with SystemdHost(scratch) as host:
        host.copy(checkpoint().path, "/srv/models/small")
        host.write("/srv/models/in.jsonl", LINE)
        for index in range(2):
            host.write(f"/etc/worker-daemon/{index}.env", "WORKER_DAEMON_DEVICE=cpu")
        host.run("systemctl enable --now worker-daemon.target worker-daemon@0 worker-daemon@1")
        yield host


@pytest.fixture(scope="module")
def tokens(host):
    return generate(host)


def generate(host, *options):
    host.client(" ".join((GENERATE, *options)))
    return host.run("cat /tmp/out.jsonl && rm /tmp/out.jsonl").stdout


def wait_for_restart(host, unit, before, limit_s):
    deadline = time.monotonic() + limit_s
    while int(host.show(unit, "NRestarts")) == before:
        assert time.monotonic() < deadline, "systemd has not started it again"
        time.sleep(0.2)
    while host.show(unit, "ActiveState") != "active":
        assert time.monotonic() < deadline + 60
        time.sleep(0.2)


def test_daemons_serve_inside_the_sandbox(host, tokens):
    assert '"token_ids"' in tokens
    assert host.show("worker-daemon@0", "StatusText").startswith("READY/link up")
    assert host.run("stat -c %U:%a /run/worker-daemon/0").stdout.strip() == "worker-daemon:700"


def test_killed_daemon_is_started_again_and_takes_its_place(host, tokens):
    before = int(host.show("worker-daemon@1", "NRestarts"))
    host.run("systemctl kill --signal KILL worker-daemon@1")
    assert generate(host, "--wait 60") == tokens
    assert int(host.show("worker-daemon@1", "NRestarts")) == before + 1


def test_daemon_that_pets_no_watchdog_is_ended_and_started_again(host, tokens):
    before = int(host.show("worker-daemon@0", "NRestarts"))
    host.run("systemctl kill --signal STOP worker-daemon@0")
    wait_for_restart(host, "worker-daemon@0", before, 40)
    assert "watchdog" in host.run("journalctl -u worker-daemon@0 --no-pager").stdout.lower()
    assert generate(host, "--reload") == tokens


def test_wrong_setting_is_not_tried_again(host, tokens):
    host.run("cp /etc/worker-daemon/0.env /tmp/0.env")
    host.run("echo WORKER_DAEMON_LOG_LEVEL=loud >> /etc/worker-daemon/0.env")
    host.run("systemctl restart worker-daemon@0", check=False)
    time.sleep(3)
    assert host.show("worker-daemon@0", "ActiveState") == "failed"
    assert host.show("worker-daemon@0", "ExecMainStatus") == "78"
    assert host.show("worker-daemon@0", "NRestarts") == "0"
    host.run("cp /tmp/0.env /etc/worker-daemon/0.env && systemctl restart worker-daemon@0")
    assert generate(host, "--reload") == tokens


def test_target_stops_all_and_leaves_the_epochs(host, tokens):
    host.run("systemctl stop worker-daemon.target worker-daemon@0 worker-daemon@1")
    for index in range(2):
        assert host.show(f"worker-daemon@{index}", "Result") == "success"
    assert host.run("ls /run/worker-daemon").stdout == ""
    assert ".epoch" in host.run("ls /var/lib/worker-daemon/0").stdout

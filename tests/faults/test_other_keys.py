"""What a key may do to the driver of another one: nothing. One daemon with the fake worker, two
keys of drivers, one of an observer."""

import json
import os
import re
import shutil
import socket
import subprocess
from functools import partial

import pytest
import zmq

from rpc_schema import lease as ls
from rpc_schema import lifecycle as lc
from rpc_schema import step
from rpc_schema.codec import decode_event
from rpc_schema.config import ParallelConfig
from rpc_schema.error_replies import ControlErrorReply, ErrorReply
from rpc_schema.errors import ErrorCode, ForbiddenError
from rpc_schema.health import Hello
from rpc_schema.version import PROTOCOL_VERSION
from tests.faults.test_security import KeyedDriver
from tests.support.command_line import short_directory
from tests.support.secured import KeyRing, SecuredDaemon, ask, dealer, unconnected
from tests.support.waiting import PATIENCE_S, wait_until
from tests.unit.server.driver import SERVE, DaemonProcess, rendezvous
from tests.unit.server.test_daemon_process import SPOILED, spoiled
from worker_client.errors import AuthenticationError
from worker_client.wire.endpoint import parse_endpoint
from worker_client.worker_group import WorkerGroup
from worker_daemon.server.auth.keygen import make_key_files
from worker_daemon.server.session.epochs import EpochFile
from worker_daemon.server.wire.endpoints import IpcEndpoint
from worker_host.key_files import fingerprint

OBSERVER, RIVAL = "observer", "rival"
EPOCH_STEP = 1 << 20


@pytest.fixture(scope="module")
def directory():
    path = short_directory()
    yield path
    shutil.rmtree(path)


@pytest.fixture(scope="module")
def ring(directory):
    made = KeyRing(directory / "keys")
    made.public[RIVAL] = make_key_files(directory / "keys" / RIVAL).public_key
    entries = json.loads(made.authorized.read_text())
    entries.append({"key": made.public[RIVAL], "role": "driver", "name": RIVAL})
    made.authorized.write_text(json.dumps(entries))
    return made


@pytest.fixture(scope="module")
def daemon(directory, ring):
    endpoint = f"ipc://{directory}/e/w0"
    ring.trust({endpoint: ring.public["daemon"]})
    made = SecuredDaemon(directory, endpoint, *ring.serve_options(), keys=ring.keys(OBSERVER))
    yield made
    assert made.process.poll() is None, made.log.read_text()
    made.stop()


@pytest.fixture
def holder(daemon, ring):
    """A driver that holds the lease and has a model."""
    made = KeyedDriver(daemon, ring, "driver")
    made.attach()
    made.make_ready()
    yield made
    made.close()


@pytest.fixture
def rival(daemon, ring, holder):
    """Another driver's key, with the holder's driver id and epoch."""
    made = KeyedDriver(daemon, ring, RIVAL)
    made.driver_id, made.epoch, made.link = holder.driver_id, holder.epoch, holder.link
    made.seq = holder.seq
    made.hello()
    yield made
    made.context.destroy(linger=0)


def test_key_whose_role_is_too_low_to_drive_is_told_so(daemon, ring):
    with (
        WorkerGroup([daemon.endpoint], ParallelConfig(), ring.keys(OBSERVER)) as group,
        pytest.raises((AuthenticationError, ForbiddenError), match="the role driver"),
    ):
        group.attach()


def test_log_says_who_attached_and_who_asked_what_only_an_admin_may(daemon, ring):
    with WorkerGroup([daemon.endpoint], ParallelConfig(), ring.keys("driver")) as group:
        group.attach()
        epoch = group.get_status()[0].epoch
    ask(
        daemon.endpoint, ring.keys("admin"), lambda client: client.ask(partial(lc.Drain, undo=True))
    )
    host, us = socket.gethostname(), f"pid {os.getpid()} of user {os.getuid()}"
    shown = {name: f"key '{name}' ({fingerprint(key)}), {us}" for name, key in ring.public.items()}
    log = daemon.log.read_text()
    who = rf"epoch {epoch}: {re.escape(host)}:{os.getpid()} \(driver [0-9a-f]{{8}}\) has attached "
    assert re.search(who + re.escape(f"({shown['driver']}) and finds no model, CREATED\n"), log)
    assert f"epoch {epoch}: its driver has detached\n" in log
    assert f"Drain asked for by {shown['admin']}\n" in log


def refused(reply, code):
    assert isinstance(reply, ControlErrorReply), reply
    assert reply.code is code
    return reply.message


def count(reply):
    """The steps that the fake worker has run."""
    assert isinstance(reply, step.ModelRunnerOutput), reply
    return int.from_bytes(reply.sampled_token_ids, "little")


def results_socket(daemon, ring, name, context, routing_id):
    """A connected results socket."""
    address = parse_endpoint(daemon.endpoint, ring.keys(name)).results
    made = unconnected(context, ring, name, routing_id=routing_id)
    monitor = made.get_monitor_socket(zmq.EVENT_HANDSHAKE_SUCCEEDED)
    made.connect(address)
    assert monitor.poll(20_000)
    made.disable_monitor()
    monitor.close()
    return made


# A driver's id and epoch.


def test_driver_id_of_another_key_does_not_attach(holder, rival):
    ids = {"driver_id": holder.driver_id, "epoch": holder.epoch + 1}
    refused(rival.call(lc.PrepareAttach, **ids), ErrorCode.LEASE_HELD)
    first = count(holder.fault())
    assert count(holder.fault()) == first + 1


def test_epoch_of_another_key_is_forbidden(holder, rival):
    before = holder.status()
    for kind, fields in (
        (ls.RenewLease, {"driver_id": holder.driver_id}),
        (lc.OpenRendezvous, {"link": holder.link + 1, "num_ranks": 2}),
        (lc.AbortLink, {"cause": "none"}),
        (lc.Detach, {}),
    ):
        reply = rival.call(kind, epoch=holder.epoch, **fields)
        message = refused(reply, ErrorCode.FORBIDDEN)
        assert f"epoch = {holder.epoch}" in message and "fix: attach" in message
    after = holder.status()
    assert (after.lease.state, after.link_state) == ("held", before.link_state)
    assert isinstance(holder.fault(), step.ModelRunnerOutput)


def test_step_under_the_epoch_of_another_key_does_not_run(holder, rival):
    """The driver is not notified either: it would take a refusal for the outcome of its own
    step."""
    first = count(holder.fault())
    rival.seq = holder.seq
    rival.send(lc.Reset, to="CREATED")
    rival.seq += 7
    rival.send_fault("none")
    assert not holder.results.poll(300)
    assert count(holder.fault()) == first + 1


def test_results_do_not_go_to_a_socket_with_the_driver_s_id(daemon, ring, holder, rival):
    thief = results_socket(daemon, ring, RIVAL, rival.context, holder.driver_id)
    try:
        assert isinstance(holder.fault(), step.ModelRunnerOutput)
        assert not thief.poll(300)
    finally:
        thief.close(linger=0)


def test_driver_that_connects_again_gets_its_results(daemon, ring, holder):
    first = count(holder.fault())
    again = results_socket(daemon, ring, "driver", holder.context, holder.results_route)
    holder.results.close()
    holder.results = again
    assert count(holder.fault()) == first + 1


def test_step_that_does_not_decode_is_the_driver_s_on_its_next_connection_too(daemon, ring, holder):
    assert isinstance(holder.fault(), step.ModelRunnerOutput)
    before = holder.status().num_bad_frames
    for _ in range(7):
        holder.step.close()
        address = parse_endpoint(daemon.endpoint, ring.keys("driver")).step
        holder.step = dealer(holder.context, address, ring, "driver")
        holder.step.send_multipart(spoiled(holder, total_num_scheduled_tokens=SPOILED))
        reply = holder.reply()
        assert isinstance(reply, ErrorReply), reply
        assert (reply.code, reply.seq) == (ErrorCode.INVALID_STEP, holder.seq)
    assert isinstance(holder.fault(), step.ModelRunnerOutput)
    assert holder.status().num_bad_frames == before


def test_any_driver_s_key_attaches_once_the_lease_has_ended(holder, rival):
    assert isinstance(holder.call(lc.Detach, epoch=holder.epoch), lc.Acknowledged)
    message = refused(rival.call(lc.Detach, epoch=holder.epoch), ErrorCode.FORBIDDEN)
    assert "another key" in message
    rival.attach(holder.epoch + 1)
    assert isinstance(rival.fault(), step.ModelRunnerOutput)
    refused(
        holder.call(ls.RenewLease, driver_id=holder.driver_id, epoch=rival.epoch),
        ErrorCode.FORBIDDEN,
    )
    assert isinstance(rival.call(lc.Detach, epoch=rival.epoch), lc.Acknowledged)


def test_nobody_is_shown_a_driver_s_id(daemon, ring, holder):
    watcher = KeyedDriver(daemon, ring, OBSERVER)
    watcher.send_control(lc.GetStatus)
    assert watcher.control.poll(20_000)
    shown = [watcher.control.recv()]
    other = KeyedDriver(daemon, ring, RIVAL)
    other.hello()
    other.send_control(lc.PrepareAttach, driver_id=other.driver_id, epoch=holder.epoch + 1)
    assert other.control.poll(20_000)
    shown.append(other.control.recv())
    assert watcher.events.poll(20_000)
    shown.append(watcher.events.recv())
    assert isinstance(decode_event(shown[-1:]), lc.Heartbeat)
    secrets = (holder.driver_id, getattr(holder, "results_route", holder.driver_id))
    for secret in secrets:
        assert not any(secret in frame for frame in shown)
        assert not any(secret.hex()[:8].encode() in frame for frame in shown)
    watcher.context.destroy(linger=0)
    other.context.destroy(linger=0)


# Epochs.


@pytest.mark.parametrize("above", [EPOCH_STEP + 1, 2**62])
def test_epoch_far_above_the_last_is_refused_and_not_stored(daemon, ring, holder, above):
    wanted = min(holder.epoch + above, 2**63 - 1)
    message = refused(
        holder.call(lc.PrepareAttach, driver_id=holder.driver_id, epoch=wanted), ErrorCode.CONFIG
    )
    assert f"epoch = {wanted}" in message and "ask for one of" in message
    before = holder.epoch
    holder.attach()
    assert holder.epoch == before + 1


def test_operator_resets_an_absurd_epoch_and_the_group_comes_up_to_it(tmp_path):
    """One daemon's epoch file was written by an attack; the other daemon is new."""
    endpoint, directory = f"ipc://{tmp_path}/old/w0", tmp_path / "old"
    stored = EpochFile(directory, IpcEndpoint.parse(endpoint)).path
    stored.write_text(f"{2**63 - 1}\n")
    words = [*SERVE, "--endpoint", endpoint]
    ended = subprocess.run(words, capture_output=True, text=True, timeout=PATIENCE_S)
    assert (ended.returncode, "--reset-epoch" in ended.stderr) == (78, True)
    daemons = [DaemonProcess(directory, "--reset-epoch"), DaemonProcess(tmp_path / "new")]
    endpoints = [daemon.endpoint for daemon in daemons]
    try:
        with WorkerGroup(endpoints, ParallelConfig(pipeline_parallel_size=2)) as group:
            first, second = (status.epoch for status in group.attach())
            assert first == second == int(stored.read_text()) > EPOCH_STEP
    finally:
        for daemon in daemons:
            daemon.stop()


# What a driver writes.


def test_texts_of_a_driver_keep_nobody_from_the_status(daemon, ring, holder):
    """Causes at the bound of the wire, of characters of four bytes, with a forged line each."""
    forged = "\x1b[2J\n2026-01-01T00:00:00.000 ERROR   [1 rank 0] x: forged\n\u202e"
    for number in range(8):
        cause = f"{number}{forged}".ljust(65_536, "\U0001f600")
        assert isinstance(
            holder.call(lc.AbortLink, epoch=holder.epoch, cause=cause), lc.Acknowledged
        )
        wait_until(lambda: holder.status().link_state == "broken", "the link is broken")
        holder.run(lc.Relink, rendezvous=rendezvous(holder.link + 1), warm_up_follows=False)
        holder.link += 1
    watcher = KeyedDriver(daemon, ring, OBSERVER)
    watcher.send_control(lc.GetStatus)
    answered = watcher.control.poll(20_000)
    frame = watcher.control.recv() if answered else b""
    watcher.context.destroy(linger=0)
    assert len(frame) < 64 << 10
    assert b"forged" in frame and b"\x1b[2J" not in frame and b"\nforged" not in frame
    log = daemon.log.read_text()
    assert "forged" in log and "\x1b" not in log and "\u202e" not in log
    assert not any(line.startswith("2026-01-01") for line in log.splitlines())
    before = holder.epoch
    holder.attach()
    assert holder.epoch == before + 1


# Hello.


@pytest.mark.parametrize("name", [OBSERVER, RIVAL])
def test_hello_of_another_key_does_not_keep_a_driver_from_attaching(daemon, ring, name):
    driver = KeyedDriver(daemon, ring, "driver")
    other = KeyedDriver(daemon, ring, name)
    driver.hello()
    for number in range(300):
        own = driver.driver_id if number % 2 else os.urandom(16)
        other.call(Hello, protocol_version=PROTOCOL_VERSION + 997, driver_id=own)
    answer = driver.call(lc.PrepareAttach, driver_id=driver.driver_id, epoch=1)
    assert isinstance(answer, lc.PrepareAttachReply), answer
    other.context.destroy(linger=0)
    driver.context.destroy(linger=0)

"""IPv6: endpoints in brackets, on loopback, and the address of the ranks' rendezvous."""

import os
import shutil
import socket

import pytest

from rpc_schema.errors import ConfigError
from tests.support.command_line import run_client, short_directory
from tests.support.secured import KeyRing, SecuredDaemon, ask, free_port
from worker_client.errors import AuthenticationError, EndpointError
from worker_client.wire.endpoint import parse_endpoint
from worker_daemon.distributed.rendezvous import RendezvousServer, connect_store
from worker_daemon.interfaces import interface_address, ipv6_address
from worker_daemon.server.wire.endpoints import TcpEndpoint


@pytest.fixture(scope="module")
def loopback():
    """The address, where this host has it."""
    try:
        socket.create_server(("::1", 0), family=socket.AF_INET6).close()
    except OSError:
        pytest.skip("this host has no IPv6")
    return "::1"


def test_daemon_on_an_ipv6_address_serves_those_with_keys(loopback):
    directory = short_directory()
    ring = KeyRing(directory / "keys")
    endpoint = f"tcp://[{loopback}]:{free_port()}"
    ring.trust({endpoint: ring.public["daemon"]})
    tcp = ("--model-root", str(directory), "--data-interface", "lo")
    keys = ring.keys("observer")
    daemon = SecuredDaemon(directory, endpoint, *ring.serve_options(), *tcp, keys=keys)
    try:
        words = ("status", "--endpoints", endpoint, "--json", *ring.options("observer"))
        shown = run_client(directory, *words).stdout
        assert f'"endpoint": "{endpoint}"' in shown and f'"pid": {daemon.process.pid}' in shown
        with pytest.raises(AuthenticationError):
            ask(endpoint, ring.keys("stranger"), lambda client: client.hello(5.0))
        assert f"{loopback}" in daemon.log.read_text()
    finally:
        daemon.stop()
        shutil.rmtree(directory)


BAD = ("tcp://::1:5600", "tcp://[::1:5600", "tcp://::1]:5600", "tcp://[nine]:5600", "tcp://[]:5600")


@pytest.mark.parametrize("text", [*BAD, "tcp://[127.0.0.1]:5600", "tcp://[::]:5600"])
def test_what_is_no_address_is_refused_with_the_form(tmp_path, text):
    with pytest.raises(ConfigError) as refused:
        TcpEndpoint.parse(text, tmp_path)
    assert refused.value.field == "endpoint"
    ring = KeyRing(tmp_path / "keys")
    ring.trust({text: ring.public["daemon"]})
    if text != "tcp://[::]:5600":  # that is an address, of which the daemon knows better
        with pytest.raises(EndpointError, match=r"tcp://\[ADDRESS\]:PORT"):
            parse_endpoint(text, ring.keys("driver"))


def test_ranks_meet_at_an_ipv6_address(loopback):
    server = RendezvousServer(loopback, 2)
    try:
        value = os.urandom(8)
        way = (server.port, server.secret, 10.0)
        for store in (connect_store(server.host, *way), connect_store(loopback, *way)):
            store.set("key", value)
            assert store.get("key") == value
            store.end()
        assert server.host == loopback
    finally:
        server.close()


LINES = [
    "fe800000000000000000000000000001 02 40 20 80     eth0",
    "20010db8000000000000000000000005 02 40 00 40     eth0",
    "20010db8000000000000000000000006 02 40 00 01     eth0",
    "20010db8000000000000000000000007 02 40 00 80     eth0",
    "fd000000000000000000000000000009 03 40 00 80     eth1",
    "fe800000000000000000000000000002 04 40 20 80     eth2",
]


@pytest.mark.parametrize(
    ("name", "address"), [("eth0", "2001:db8::7"), ("eth1", "fd00::9"), ("eth2", ""), ("eth9", "")]
)
def test_address_is_one_that_other_hosts_can_use(name, address):
    assert ipv6_address(name, LINES) == address


def test_interface_with_both_is_known_by_its_ipv4_address():
    assert interface_address("lo") == "127.0.0.1"

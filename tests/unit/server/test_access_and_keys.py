"""Key files, roles, bans and the audit's lines, without a process."""

import json
import os
from pathlib import Path

import pytest
import zmq

from rpc_schema.base import ControlRequest
from rpc_schema.errors import ConfigError, ForbiddenError
from rpc_schema.operations import CONTROL_OPERATIONS, STEP_OPERATIONS
from rpc_schema.roles import Role
from tests.contract.random_messages import fixed_example
from worker_client.wire import keys as client_keys
from worker_daemon.interfaces import interface_address
from worker_daemon.server.auth import security
from worker_daemon.server.auth.access import Access, KeyedAccess, needed_role
from worker_daemon.server.auth.bad_peers import (
    BAN_S,
    MAX_BAD_FRAMES,
    MAX_REMEMBERED,
    WINDOW_S,
    BadPeers,
)
from worker_daemon.server.auth.keygen import make_key_files
from worker_daemon.server.auth.keys import AuthorizedKeys, read_identity
from worker_daemon.server.auth.security import cipher_mb_s
from worker_daemon.server.auth.zap import AuditLog
from worker_daemon.server.wire.endpoints import TcpEndpoint
from worker_daemon.settings import load_settings, prepare_environment
from worker_host import key_files as kf
from worker_host.key_files import KeyFileError


class Clock:
    now = 1000.0

    def __call__(self) -> float:
        return self.now


def new_key() -> str:
    return zmq.curve_keypair()[0].decode()


# Files.


def test_made_keys_are_a_pair_that_only_this_user_reads(tmp_path: Path) -> None:
    made = make_key_files(tmp_path / "new" / "w0")
    assert made.secret.stat().st_mode & 0o777 == 0o400
    assert made.public.stat().st_mode & 0o777 == 0o644
    assert made.secret.parent.stat().st_mode & 0o777 == 0o700
    secret = kf.read_secret_key(made.secret, "key-file")
    assert zmq.curve_public(secret.secret_key.encode()).decode() == secret.public_key
    assert secret.public_key == made.public_key
    assert secret.secret_key not in made.public.read_text()
    assert secret.secret_key not in repr(secret)
    identity = read_identity(made.secret, is_credential=False)
    assert identity.public_key == made.public_key
    assert secret.secret_key not in repr(identity)


@pytest.mark.parametrize("existing", ["w0.key", "w0.pub"])
def test_no_key_is_overwritten_nor_half_made(tmp_path: Path, existing: str) -> None:
    (tmp_path / existing).write_text("precious")
    with pytest.raises(ConfigError, match="never overwritten"):
        make_key_files(tmp_path / "w0")
    assert [path.name for path in tmp_path.iterdir()] == [existing]
    assert (tmp_path / existing).read_text() == "precious"


@pytest.mark.parametrize("mode", [0o440, 0o404, 0o600 | 0o020, 0o777])
def test_secret_that_others_may_read_is_refused_with_the_fix(tmp_path: Path, mode: int) -> None:
    secret = make_key_files(tmp_path / "w0").secret
    secret.chmod(mode)
    with pytest.raises(ConfigError, match=r"chmod 0400 .*make a new key"):
        read_identity(secret, is_credential=False)


def test_credential_may_show_rights_of_the_group_and_no_others(tmp_path: Path) -> None:
    secret = make_key_files(tmp_path / "w0").secret
    secret.chmod(0o440)
    assert read_identity(secret, is_credential=True).secret_key
    secret.chmod(0o444)
    with pytest.raises(ConfigError, match="others may read"):
        read_identity(secret, is_credential=True)


def test_malformed_secret_is_refused_and_not_repeated(tmp_path: Path) -> None:
    made = make_key_files(tmp_path / "w0")
    content = json.loads(made.secret.read_text())
    other = make_key_files(tmp_path / "w1")
    secret_key = content["secret_key"]
    for wrong in (
        {**content, "secret_key": secret_key + "x"},
        {**content, "secret_key": secret_key[:-1] + '"'},
        {**content, "more": 1},
        {"kind": content["kind"]},
        {**content, "public_key": other.public_key},
        [],
    ):
        file = tmp_path / "bad.key"
        file.write_text(json.dumps(wrong))
        file.chmod(0o400)
        with pytest.raises(ConfigError) as caught:
            read_identity(file, is_credential=False)
        assert secret_key[:12] not in str(caught.value)
        file.unlink()


def test_key_that_is_given_itself_is_not_repeated() -> None:
    secret_key = zmq.curve_keypair()[1].decode().replace("/", "x")
    with pytest.raises(KeyFileError, match="never pass the key itself") as caught:
        kf.read_secret_key(Path(secret_key), "key-file")
    assert secret_key not in str(caught.value)


def test_lists_that_others_may_change_are_refused(tmp_path: Path) -> None:
    authorized, known = tmp_path / "a.json", tmp_path / "k.json"
    authorized.write_text("[]")
    known.write_text("{}")
    assert kf.read_authorized_keys(authorized, "authorized-keys") == ()
    assert kf.read_known_daemons(known, "known_daemons") == {}
    for file, read in ((authorized, kf.read_authorized_keys), (known, kf.read_known_daemons)):
        file.chmod(0o666)
        with pytest.raises(KeyFileError, match=r"others may change it.*chmod go-w"):
            read(file, "x")


@pytest.mark.parametrize(
    "entry",
    [
        {"key": "short", "role": "driver", "name": "a"},
        {"key": "x" * 40, "role": "root", "name": "a"},
        {"key": "x" * 40, "role": "driver"},
        {"key": "x" * 40, "role": "driver", "name": "a", "more": 1},
    ],
)
def test_malformed_authorized_key_is_refused(tmp_path: Path, entry: dict[str, object]) -> None:
    file = tmp_path / "a.json"
    file.write_text(json.dumps([entry]))
    with pytest.raises(ConfigError, match="malformed"):
        AuthorizedKeys(file)


def test_key_with_two_roles_is_refused(tmp_path: Path) -> None:
    file, key = tmp_path / "a.json", new_key()
    entries = [{"key": key, "role": role, "name": role} for role in ("driver", "observer")]
    file.write_text(json.dumps(entries))
    with pytest.raises(ConfigError, match="named twice"):
        AuthorizedKeys(file)


def test_reload_tells_whether_somebody_lost_a_role(tmp_path: Path) -> None:
    file, first, second = tmp_path / "a.json", new_key(), new_key()

    def write(**roles: str) -> None:
        keys = {"first": first, "second": second}
        entries = [{"key": keys[name], "role": role, "name": name} for name, role in roles.items()]
        file.write_text(json.dumps(entries))

    write(first="driver")
    keys = AuthorizedKeys(file)
    write(first="admin", second="observer")
    assert not keys.reload()
    assert (keys.role(first), keys.role(second)) == (Role.ADMIN, Role.OBSERVER)
    write(first="observer", second="observer")
    assert keys.reload()
    file.write_text("{")
    before = keys.by_key  # verdicts hold while this is the same object
    assert not keys.reload()
    assert keys.role(first) is Role.OBSERVER and keys.by_key is before
    write(second="observer")
    assert keys.reload()
    assert keys.role(first) is None and keys.by_key is not before


# Roles.


class FixedRole:
    def __init__(self, role: Role | None) -> None:
        self._role = role

    def role(self, public_key: str) -> Role | None:
        return self._role


def every_request() -> list[type]:
    return [*CONTROL_OPERATIONS, *STEP_OPERATIONS]


@pytest.mark.parametrize("role", [None, *Role])
def test_each_request_is_allowed_to_its_role_and_those_above(role: Role | None) -> None:
    access, key = KeyedAccess(FixedRole(role)), new_key()
    for kind in every_request():
        message = fixed_example(kind)
        needed = needed_role(message)
        if role is not None and role.covers(needed):
            access.check(key, message)
        else:
            with pytest.raises(ForbiddenError, match=f"{kind.__name__} needs the role {needed}"):
                access.check(key, message)
        Access().check(("step", b"anybody"), message)


@pytest.mark.parametrize("access", [KeyedAccess(FixedRole(Role.ADMIN)), Access()])
def test_request_that_the_table_does_not_list_is_forbidden(access: Access) -> None:
    class Unlisted(ControlRequest, frozen=True, tag=99):
        """One that somebody added to the wire alone."""

    with pytest.raises(ForbiddenError, match="Unlisted is not in the table of operations"):
        access.check("key", Unlisted(call=1))


def test_only_what_changes_nothing_is_for_observers() -> None:
    names = {k.__name__ for k in every_request() if needed_role(fixed_example(k)) is Role.OBSERVER}
    assert names == {
        "Hello",
        "CheckHealth",
        "GetStatus",
        "ReadClock",
        "ReadTrace",
        "ReadDriverSteps",
    }


def test_sockets_of_steps_are_for_drivers() -> None:
    key = new_key()
    for role, opened in (
        (None, set()),
        (Role.OBSERVER, {"control", "events"}),
        (Role.DRIVER, {"control", "events", "step", "results"}),
    ):
        access = KeyedAccess(FixedRole(role))
        sockets = ("control", "events", "step", "results")
        assert {name for name in sockets if access.opens(key, name)} == opened


# Bans.


def test_fifth_bad_frame_within_the_window_bans_for_a_while() -> None:
    clock = Clock()
    bad = BadPeers(clock)
    for _ in range(MAX_BAD_FRAMES - 1):
        assert not bad.count("a")
    assert "a" not in bad
    assert bad.count("a")
    assert "a" in bad
    assert "b" not in bad
    clock.now += BAN_S - 0.1
    assert "a" in bad
    clock.now += 0.2
    assert "a" not in bad
    assert not bad.count("a")  # it begins anew
    assert bad.num_bad_frames == MAX_BAD_FRAMES + 1


def test_bad_frames_far_apart_ban_nobody() -> None:
    clock = Clock()
    bad = BadPeers(clock)
    for _ in range(50):
        assert not bad.count("a")
        clock.now += WINDOW_S / (MAX_BAD_FRAMES - 1) + 0.01


def test_number_of_peers_that_are_remembered_is_bounded() -> None:
    bad = BadPeers(Clock())
    for number in range(3 * MAX_REMEMBERED):
        for _ in range(MAX_BAD_FRAMES):
            bad.count(("step", number.to_bytes(4, "big")))
    held = sum(("step", n.to_bytes(4, "big")) in bad for n in range(3 * MAX_REMEMBERED))
    assert held == MAX_REMEMBERED


def test_driver_gives_a_handshake_up_well_before_the_daemon_does() -> None:
    """Else the daemon's end of it would be taken for a refusal."""
    daemon_s = min(security.HANDSHAKE_MS, security.LOCAL_HANDSHAKE_MS)
    assert 0.75 * daemon_s >= client_keys.HANDSHAKE_MS


def test_ban_without_a_bad_frame_lasts_as_long() -> None:
    clock = Clock()
    bad = BadPeers(clock)
    bad.ban("a")
    assert "a" in bad and "b" not in bad and bad.num_bad_frames == 0
    clock.now += BAN_S + 0.1
    assert "a" not in bad


def test_audit_writes_some_lines_and_counts_the_rest() -> None:
    lines: list[str] = []
    clock = Clock()
    audit = AuditLog(lines.append, burst=3, window_s=10.0, clock=clock)
    for number in range(100):
        audit.refused("step", f"peer {number}", "why")
    assert len(lines) == 3
    assert audit.num_refused == 100
    clock.now += 10.1
    audit.refused("step", "peer x", "why")
    assert lines[-1] == "refused at the step socket: peer x: why (97 such lines were left out)"


# Endpoints and settings of tcp.


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("tcp://0.0.0.0:5000", "every interface"),
        ("tcp://[::]:5000", "every interface"),
        ("tcp://*:5000", "numeric address"),
        ("tcp://host:5000", "numeric address"),
        ("tcp://::1:5000", "numeric address"),
        ("tcp://127.0.0.1", "numeric address"),
        ("tcp://127.0.0.1:5000/x", "numeric address"),
        ("tcp://127.0.0.999:5000", "numeric address"),
        ("tcp://127.0.0.1:0", "four ports"),
        ("tcp://127.0.0.1:65533", "four ports"),
    ],
)
def test_bad_tcp_endpoint_is_refused(tmp_path: Path, text: str, words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        TcpEndpoint.parse(text, tmp_path)


def test_tcp_endpoint_takes_four_ports_in_a_row(tmp_path: Path) -> None:
    endpoint = TcpEndpoint.parse("tcp://[::1]:65532", tmp_path)
    assert endpoint.address("control") == "tcp://[::1]:65532"
    assert endpoint.address("events") == "tcp://[::1]:65535"
    assert endpoint.lock_path.is_relative_to(tmp_path)


def test_tcp_needs_keys_roots_and_an_interface_and_no_setting_lifts_that(tmp_path: Path) -> None:
    made = make_key_files(tmp_path / "w0")
    needed: dict[str, str | int | list[str] | None] = {
        "key-file": str(made.secret),
        "authorized-keys": str(tmp_path / "a.json"),
        "model-root": [str(tmp_path)],
        "data-interface": "lo",
    }
    given = {"endpoint": "tcp://127.0.0.1:5000", "device": "cpu", **needed}
    assert load_settings(given, None).data_interface == "lo"
    for key in needed:
        with pytest.raises(ConfigError, match=key):
            load_settings({**given, key: None}, None)


@pytest.mark.parametrize("name", ["0.0.0.0", "*", "10.0.0.1", "eth0,eth1"])
def test_data_interface_is_one_by_name(tmp_path: Path, name: str) -> None:
    given = {"endpoint": "ipc:///a/b", "device": "cpu", "data-interface": name}
    with pytest.raises(ConfigError, match="data-interface"):
        interface_address(load_settings(given, None).data_interface)


def test_interface_has_an_address_or_is_refused() -> None:
    assert interface_address("lo") == "127.0.0.1"
    with pytest.raises(ConfigError, match=r"name one of .*lo"):
        interface_address("none0")


def test_named_interface_is_set_for_gloo_and_nccl(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "environ", {"GLOO_SOCKET_IFNAME": "eth7"})
    prepare_environment("eth1")
    assert os.environ["GLOO_SOCKET_IFNAME"] == "eth1"
    assert os.environ["NCCL_SOCKET_IFNAME"] == "=eth1"


def test_credential_is_a_file_of_systemds_directory(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    given = {
        "endpoint": "ipc:///a/b",
        "device": "cpu",
        "key-file": "credential:w0.key",
        "authorized-keys": "credential:a.json",
    }
    monkeypatch.delenv("CREDENTIALS_DIRECTORY", raising=False)
    with pytest.raises(ConfigError, match=r"LoadCredential=w0\.key"):
        load_settings(given, None)
    monkeypatch.setenv("CREDENTIALS_DIRECTORY", str(tmp_path))
    settings = load_settings(given, None)
    assert (settings.key_file, settings.key_is_credential) == (tmp_path / "w0.key", True)
    with pytest.raises(ConfigError, match="no such credential"):
        load_settings({**given, "key-file": "credential:../w0.key"}, None)
    with pytest.raises(ConfigError, match="give both"):
        load_settings({**given, "authorized-keys": None}, None)


def test_cipher_is_timed() -> None:
    speed = cipher_mb_s()
    assert speed is not None
    assert speed > 1

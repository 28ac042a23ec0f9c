"""`worker-probe live|ready`: asks daemons for their health, for supervisors. It does what
`worker-client status --probe` does, without the imports of the other commands: these take nearly
all of that command's time."""

import argparse
import os
import sys
from collections.abc import Mapping, Sequence
from enum import StrEnum
from pathlib import Path
from typing import Final

from rpc_schema.control import PROBE_OPERATIONS
from rpc_schema.errors import WorkerDaemonError
from rpc_schema.health import GetStatusHead
from worker_client.cli.command_errors import exit_with
from worker_client.errors import config_error
from worker_client.wire.endpoint import named_daemons
from worker_client.wire.health_client import HealthClient, connected
from worker_client.wire.keys import NO_KEYS, Keys, read_keys
from worker_host.plain_text import printable

NOT_PASSED: Final = 1
"""Exit code if a daemon fails the probe."""


class Probe(StrEnum):
    """Condition that a supervisor probes for."""

    LIVE = "live"
    """The daemon answers, and nothing is past its deadline."""
    READY = "ready"
    """LIVE, and the daemon has a model that is ready and accepts drivers."""


class ProbeClient(HealthClient):
    """Asks one daemon whether it passes a probe."""

    operations = PROBE_OPERATIONS

    def obstacle(self, probe: Probe) -> str:
        """Return why the daemon fails the probe; empty: it passes."""
        health = self.check_health()
        if not health.healthy:
            return health.detail or "it is not healthy"
        if probe is Probe.LIVE:
            return ""
        status = self.ask(GetStatusHead).status
        if status.serving != "SERVING":
            return f"it is {status.serving}"
        return "" if status.load == "READY" else f"its model is not ready: {status.load}"


def run_probe(
    endpoints: Sequence[str], probe: Probe, keys: Keys = NO_KEYS, wait_s: float = 0.0
) -> int:
    """Probe daemons, and write a line to standard error for each that fails the probe. Return the
    exit code. wait_s, errors: see connected() and HealthClient.hello()."""
    with connected(ProbeClient, endpoints, keys, wait_s) as clients:
        for client in clients:
            client.hello()
        failed = [
            f"{client.endpoint.control}: {printable(why)}\n"
            for client in clients
            if (why := client.obstacle(probe))
        ]
    sys.stderr.write("".join(failed))
    return NOT_PASSED if failed else 0


def main() -> None:
    """Run the command line."""
    options = _parser(os.environ).parse_args()
    try:
        keys = read_keys(options.key_file, options.known_daemons)
        code = run_probe(
            named_daemons(options.endpoints), Probe(options.probe), keys, _seconds(options.wait)
        )
    except WorkerDaemonError as error:
        exit_with(error)
    sys.exit(code)


def _parser(environment: Mapping[str, str]) -> argparse.ArgumentParser:
    """Return the parser: the options of `worker-client status`, with the same variables."""
    parser = argparse.ArgumentParser(
        prog="worker-probe",
        description="Ask daemons for their health. Exits with 0 if all pass, with 1 and a line for "
        "each that fails, with 2 if one does not answer.",
        allow_abbrev=False,
    )
    parser.add_argument("probe", choices=[each.value for each in Probe], help="what to ask for")
    for name, kind, text in (
        ("endpoints", str, "running daemons: EP,EP,..."),
        ("key-file", str, "our secret file, or credential:NAME; needed on tcp"),
        ("known-daemons", Path, "JSON file of the daemons' public keys"),
        ("wait", str, "seconds to wait for daemons that are not started yet"),
    ):
        variable = f"WORKER_CLIENT_{name.upper().replace('-', '_')}"
        given = environment.get(variable) or None
        parser.add_argument(f"--{name}", type=kind, default=given, help=f"{text} [{variable}]")
    return parser


def _seconds(text: str | None) -> float:
    try:
        seconds = float(text or 0.0)
    except ValueError:
        seconds = -1.0
    if seconds >= 0.0:
        return seconds
    raise config_error("wait", text, "it is no time", "give seconds, 0 or more")


if __name__ == "__main__":
    main()

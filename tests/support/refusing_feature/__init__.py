"""A feature that refuses tokens at random, added to a copy of the tree: requests gain fewer tokens
than their steps count, and compute the others again. `run.py` drives daemons of the copy."""

import shutil
from pathlib import Path
from typing import NamedTuple

HERE = Path(__file__).parent
ROOT = HERE.parents[2]
PACKAGES = (
    "model_hub",
    "rendezvous",
    "rpc_schema",
    "worker_daemon",
    "worker_host",
    "client/worker_client",
)

FILES = {
    "wire.py": "rpc_schema/random_refusals.py",
    "daemon.py": "worker_daemon/runner/parts/random_refusals.py",
    "driver.py": "client/worker_client/parts/random_refusals.py",
    "run.py": "run.py",
    "plans.py": "plans.py",
}
"""Target path of each file."""


class Line(NamedTuple):
    """A registration: a line inserted before the first occurrence of a text."""

    path: str
    before: str
    text: str


LINES = [
    Line(
        "rpc_schema/extensions.py",
        "\nRequestExtension",
        "from rpc_schema.random_refusals import RandomRefusals\n",
    ),
    Line("rpc_schema/extensions.py", " | LogprobsWanted", " | RandomRefusals"),
    Line(
        "worker_daemon/runner/parts/registry.py",
        "from worker_daemon.runner.parts.token_logprobs",
        "from worker_daemon.runner.parts.random_refusals import RandomRefusalsPart\n",
    ),
    Line(
        "worker_daemon/runner/parts/registry.py",
        "    StopTokensPart,\n",
        "    RandomRefusalsPart,\n",
    ),
    Line(
        "client/worker_client/parts/registry.py",
        "\nExtensions: TypeAlias",
        "from worker_client.parts.random_refusals import RandomRefusalsPart\n",
    ),
    Line(
        "client/worker_client/parts/registry.py",
        "    LogprobsPart(),\n",
        "    RandomRefusalsPart(),\n",
    ),
]


def copy_with_the_feature(directory: Path) -> Path:
    """Return a copy of the packages that has it."""
    for package in PACKAGES:
        ignored = shutil.ignore_patterns("*.pyc.*")  # being written; the others stay valid
        shutil.copytree(ROOT / package, directory / package, ignore=ignored)
    for name, place in FILES.items():
        assert not (directory / place).exists()
        shutil.copy(HERE / name, directory / place)
    shutil.copy(HERE.parent / "forked_drivers.py", directory)
    for line in LINES:
        path = directory / line.path
        text = path.read_text()
        assert text.count(line.before) >= 1, line
        path.write_text(text.replace(line.before, line.text + line.before, 1))
    return directory

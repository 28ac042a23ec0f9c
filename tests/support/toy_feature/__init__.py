"""Two example features, added to a copy of the tree. The first one biases the logit of one token,
for requests that ask for it, in every second token: four files (wire.py, daemon.py, driver.py;
steps.py has the values for each step) and the lines that register them. The second one
(checked_*.py) takes several samples of a request in one step. `run.py` drives daemons of the
copy."""

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
    "wire.py": "rpc_schema/token_bias.py",
    "daemon.py": "worker_daemon/runner/parts/token_bias.py",
    "driver.py": "client/worker_client/parts/token_bias.py",
    "steps.py": "client/worker_client/driver_parts/token_bias.py",
    "run.py": "run.py",
    "plans.py": "plans.py",
}
"""Target path of each file of the first feature, and of its driver."""

CHECKED_FILES = {
    "checked_wire.py": "rpc_schema/checked_tokens.py",
    "checked_daemon.py": "worker_daemon/runner/parts/checked_tokens.py",
    "checked_driver.py": "client/worker_client/parts/checked_tokens.py",
    "checked_steps.py": "client/worker_client/driver_parts/checked_tokens.py",
}
"""Target path of each file of the second one."""


class Line(NamedTuple):
    """A registration: a line inserted before the first occurrence of a text."""

    path: str
    before: str
    text: str


LINES = [
    Line(
        "rpc_schema/extensions.py",
        "\nRequestExtension",
        "from rpc_schema.token_bias import BiasedRows, TokenBias\n",
    ),
    Line("rpc_schema/extensions.py", " | LogprobsWanted", " | TokenBias"),
    Line("rpc_schema/extensions.py", '\n"""Extension of one step', " | BiasedRows"),
    Line(
        "worker_daemon/runner/parts/registry.py",
        "from worker_daemon.runner.parts.token_logprobs",
        "from worker_daemon.runner.parts.token_bias import TokenBiasPart\n",
    ),
    Line("worker_daemon/runner/parts/registry.py", "    StopTokensPart,\n", "    TokenBiasPart,\n"),
    Line(
        "client/worker_client/parts/registry.py",
        "\nExtensions: TypeAlias",
        "from worker_client.parts.token_bias import TokenBiasPart\n",
    ),
    Line(
        "client/worker_client/parts/registry.py",
        "    LogprobsPart(),\n",
        "    TokenBiasPart(),\n",
    ),
    Line(
        "client/worker_client/driver_parts/registry.py",
        "\n\n@dataclass",
        "from worker_client.driver_parts.token_bias import EvenTokensPart\n",
    ),
    Line(
        "client/worker_client/driver_parts/registry.py",
        "    lambda context, options: structured_parts",
        "    lambda context, options: (EvenTokensPart(),),\n",
    ),
]

CHECKED_LINES = [
    Line(
        "rpc_schema/extensions.py",
        "\nRequestExtension",
        "from rpc_schema.checked_tokens import CheckedTokens\n",
    ),
    Line("rpc_schema/extensions.py", " | LogprobsWanted", " | CheckedTokens"),
    Line(
        "worker_daemon/runner/parts/registry.py",
        "from worker_daemon.runner.parts.token_logprobs",
        "from worker_daemon.runner.parts.checked_tokens import CheckedTokensPart\n",
    ),
    Line(
        "worker_daemon/runner/parts/registry.py",
        "    StopTokensPart,\n",
        "    CheckedTokensPart,\n",
    ),
    Line(
        "client/worker_client/parts/registry.py",
        "\nExtensions: TypeAlias",
        "from worker_client.parts.checked_tokens import CheckedTokensPart\n",
    ),
    Line(
        "client/worker_client/parts/registry.py",
        "    LogprobsPart(),\n",
        "    CheckedTokensPart(),\n",
    ),
    Line(
        "client/worker_client/driver_parts/registry.py",
        "\n\n@dataclass",
        "from worker_client.driver_parts.checked_tokens import CheckedTokensPart\n",
    ),
    Line(
        "client/worker_client/driver_parts/registry.py",
        "    lambda context, options: structured_parts",
        "    lambda context, options: (CheckedTokensPart(),),\n",
    ),
]


def copy_with_the_feature(directory: Path) -> Path:
    """Return a copy of the packages that has both."""
    for package in PACKAGES:
        ignored = shutil.ignore_patterns("*.pyc.*")  # being written; the others stay valid
        shutil.copytree(ROOT / package, directory / package, ignore=ignored)
    for name, place in (FILES | CHECKED_FILES).items():
        assert not (directory / place).exists()
        shutil.copy(HERE / name, directory / place)
    shutil.copy(HERE.parent / "forked_drivers.py", directory)
    for line in (*LINES, *CHECKED_LINES):
        path = directory / line.path
        text = path.read_text()
        assert text.count(line.before) >= 1, line
        path.write_text(text.replace(line.before, line.text + line.before, 1))
    return directory

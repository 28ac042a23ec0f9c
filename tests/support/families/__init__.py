"""Model families that only tests have, registered as docs/adding-a-model.md describes: their layers
keep other things than keys and values.

`python -m tests.support.families ARGS` is the daemon's real command line with these families.
"""

from collections.abc import Mapping
from pathlib import Path
from types import MappingProxyType

from tests.support.families import decaying, latent
from worker_client.launcher import Command, serve_command
from worker_daemon.models import registry
from worker_daemon.models.registry import Describe

TEST_FAMILIES: Mapping[str, Describe] = MappingProxyType(
    {
        "DecayingSumForCausalLM": decaying.describe,
        "DeepseekV3ForCausalLM": latent.describe,
    }
)


def all_families() -> Mapping[str, Describe]:
    """Return the table of families with those of tests."""
    return MappingProxyType({**registry.FAMILIES, **TEST_FAMILIES})


def command(model_root: Path) -> Command:
    """Return the command lines of daemons with these families, for LocalDaemons."""
    return serve_command("--model-root", str(model_root), module="tests.support.families")

"""Memory figures and control groups of this process, as Linux reports them."""

from contextlib import suppress
from pathlib import Path
from typing import Final

CGROUPS: Final = Path("/sys/fs/cgroup")
OWN_CGROUP: Final = Path("/proc/self/cgroup")
MEMINFO: Final = Path("/proc/meminfo")
STATUS: Final = Path("/proc/self/status")


def read_sizes(path: Path) -> dict[str, int]:
    """Parse lines of `Name:  123 kB` into bytes by name."""
    fields = (line.split() for line in path.read_text().splitlines())
    return {f[0].rstrip(":"): int(f[1]) * 1024 for f in fields if len(f) == 3 and f[2] == "kB"}


def own_cgroups(cgroups: Path = CGROUPS, own_cgroup: Path = OWN_CGROUP) -> list[Path]:
    """Return the directories of the process's control group (version 2) and of its ancestors, the
    innermost first; only the root if the group is unknown or outside the root."""
    paths: list[str] = []
    with suppress(OSError):
        lines = own_cgroup.read_text().splitlines()
        paths = [line[3:].lstrip("/") for line in lines if line.startswith("0::")]
    inner = cgroups / paths[0] if paths and ".." not in paths[0] else cgroups
    return [group for group in (inner, *inner.parents) if group.is_relative_to(cgroups)]

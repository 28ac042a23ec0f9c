"""Regular expressions of a checkpoint for names of modules. They have Python's meaning, and their
author may want them to take forever: a process that can be killed matches them."""

import json
import subprocess
import sys
from collections.abc import Collection, Sequence
from pathlib import Path
from typing import Final

from rpc_schema.errors import ConfigError
from worker_daemon.errors import config_error
from worker_host.plain_text import one_line

CPU_S: Final = 3
"""CPU time for all patterns of a checkpoint."""
LIMIT_S: Final = 60.0
"""The same on the clock: a host may be slow, or have stopped the process."""
MEMORY_BYTES: Final = 1 << 30
MAX_PATTERNS: Final = 32
MAX_CHARS: Final = 1024
_PROGRAM: Final = Path(__file__).with_name("match_patterns.py")
_MAX_SHOWN: Final = 300
_LIST_NAMES: Final = "list the names of the modules"


def matching_names(field: str, patterns: Sequence[str], names: Collection[str]) -> frozenset[str]:
    """Return the names that begin with a match of a pattern (re.match). field: the patterns' field
    of config.json.

    Raises:
        ConfigError: there are too many patterns, or one is too long, is no regular expression, or
            takes too much time or memory.
    """
    if len(patterns) > MAX_PATTERNS:
        problem = f"has more than {MAX_PATTERNS} patterns"
        raise config_error(field, len(patterns), f"{field} {problem}", _LIST_NAMES)
    for pattern in patterns:
        if len(pattern) > MAX_CHARS:
            raise _refused(field, pattern, f"has more than {MAX_CHARS} characters")
    if not patterns:
        return frozenset()
    listed = list(names)
    answers = _answers(json.dumps([patterns, listed]).encode())
    found: set[str] = set()
    for index, pattern in enumerate(patterns):
        answer = answers[index] if index < len(answers) else None
        if answer is None:
            raise _refused(field, pattern, "takes too much time or memory to match")
        if isinstance(answer, str):
            raise _refused(field, pattern, f"is not a regular expression: {answer}")
        found.update(listed[number] for number in answer)
    return frozenset(found)


def _answers(request: bytes) -> list[list[int] | str]:
    """Return the answers of a process that may end before the last one."""
    command = [sys.executable, "-I", "-S", "-W", "ignore", str(_PROGRAM), str(CPU_S)]
    try:
        ended = subprocess.run(
            [*command, str(MEMORY_BYTES)],
            input=request,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            timeout=LIMIT_S,
            start_new_session=True,  # a signal from the terminal is for the daemon
            check=False,
        )
        written = ended.stdout
    except subprocess.TimeoutExpired as late:
        written = late.stdout or b""
    except OSError as error:
        problem = (
            f"no process could be started to match the checkpoint's patterns: {error.strerror}"
        )
        raise ConfigError(problem, fix="free memory or processes on this host") from error
    return [json.loads(line) for line in written.splitlines(keepends=True) if line.endswith(b"\n")]


def _refused(field: str, pattern: str, problem: str) -> ConfigError:
    problem = one_line(f"{field} has a pattern that {problem}", _MAX_SHOWN)
    return config_error(field, one_line(pattern, _MAX_SHOWN), problem, _LIST_NAMES)

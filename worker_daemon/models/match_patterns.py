"""A process that matches a checkpoint's regular expressions. module_patterns.py executes this file,
which needs the standard library alone: `python -I -S match_patterns.py CPU_S MEMORY_BYTES`.

It reads [patterns, names] as JSON. For each pattern it writes one line of JSON: the indices of the
names that begin with a match, or the reason why it is no regular expression.
"""

import json
import re
import resource
import sys


def matches_of(pattern: str, names: list[str]) -> list[int] | str:
    """Return the indices of the names that match, or why the pattern does not compile."""
    try:
        compiled = re.compile(pattern)
    except (re.error, RecursionError, OverflowError) as error:
        return str(error)
    return [index for index, name in enumerate(names) if compiled.match(name)]


def main() -> None:
    """Answer one request; the kernel ends this process at its limits."""
    cpu_s, memory_bytes = map(int, sys.argv[1:])
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    resource.setrlimit(resource.RLIMIT_AS, (memory_bytes, memory_bytes))
    resource.setrlimit(resource.RLIMIT_CPU, (cpu_s, cpu_s))
    patterns, names = json.load(sys.stdin)
    for pattern in patterns:
        sys.stdout.write(f"{json.dumps(matches_of(pattern, names))}\n")
        sys.stdout.flush()


if __name__ == "__main__":
    main()

"""The tests whose failure is never excused by a second run that passes: what they check is right
every time, or wrong. Decided by a file's folder, or by its text."""

import re
from pathlib import Path
from types import MappingProxyType

FOLDERS = MappingProxyType(
    {"tests/faults": "a test of faults", "tests/arch": "a static check"},
)
SIGNS = MappingProxyType(
    {
        "token equality": re.compile(
            r"assert_greedy|assert_same|assert_serves|NearTie|check_serving|check_adoption"
            r"|undisturbed run|[Tt](?:okens|exts) (?:are|equal)|same tokens|[Pp]arity"
            r"|assert .*\b(?:tokens|token_ids)\b.* == |assert .* == .*\b(?:tokens|token_ids)\b"
        ),
        "exactly-once": re.compile(r"[Ee]xactly.once|[Ee]xecuted (?:once|twice)|SequenceGate"),
        "leaks": re.compile(
            r"\b[Ll]eak|num_fds|num_descriptors|num_threads|/proc/self/fd|tracemalloc|\bis left\b"
        ),
    }
)
"""What a file's text has that tests these."""


def never_excused(root: Path, test: str, whens: frozenset[str]) -> str | None:
    """Return why this test's failure is final; None if it may be excused. whens: the parts of the
    test that failed."""
    path = test.partition("::")[0]
    for folder, reason in FOLDERS.items():
        if path.startswith(f"{folder}/"):
            return reason
    if "teardown" in whens:
        return "failed at its end, where leaks are noticed"
    text = (root / path).read_text()
    for subject, sign in SIGNS.items():
        if sign.search(text):
            return f"of a file with tests of {subject}"
    return None

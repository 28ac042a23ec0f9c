"""The source uses one name per thing, and no name that the project has dropped."""

import ast
import re
from collections import defaultdict
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
SOURCES = sorted(
    path
    for package in ("rpc_schema", "client", "worker_daemon")
    for path in (ROOT / package).rglob("*.py")
)
DOCUMENTS = [ROOT / "README.md", ROOT / "ARCHITECTURE.md", ROOT / "CONTRIBUTING.md"]
DOCUMENTS += sorted((ROOT / "docs").rglob("*.md"))
GIVEN_UP = {
    "doorkeeper": "ZAP handler",
    "ended well": "succeeded",
    "heir": "the driver that adopts",
    "likeliest token": "most likely token",
    "meeting place": "rendezvous",
    "obituary": "death report",
    "omen": "announced exit",
    "premises": "runtime files",
    "roster": "request queues",
    "standings": "liveness",
    "turnstile": "connection limit",
    "under way": "in flight, running",
    "whoever": "any driver, process or thread",
}
OPENERS = ("What", "Whether", "How", "Where", "When", "Which", "Of", "As", "Theirs.")
"""A docstring begins with a verb or with the noun that it describes."""
ERRORS = ("worker_daemon/errors.py", "rpc_schema/errors.py", "client/worker_client/errors.py")
"""Their classes come in pairs: an error, and what the other side makes of its code."""


def relative(path):
    return path.relative_to(ROOT).as_posix()


def docstrings(tree):
    """Strings that are statements: docstrings, including those of attributes."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant):
            value = node.value.value
            if isinstance(value, str):
                yield node.lineno, value


@pytest.mark.parametrize("path", [*SOURCES, *DOCUMENTS], ids=relative)
def test_no_word_that_was_given_up(path):
    words = "|".join(GIVEN_UP)
    found = re.findall(rf"(?<![a-z])({words})s?(?![a-z])", path.read_text().lower())
    assert not found, {word: GIVEN_UP[word] for word in found}


@pytest.mark.parametrize("path", SOURCES, ids=relative)
def test_docstrings_begin_with_what_a_thing_is_or_does(path):
    texts = docstrings(ast.parse(path.read_text()))
    wrong = [(line, text[:60]) for line, text in texts if text.split(" ", 1)[0] in OPENERS]
    assert not wrong


@pytest.mark.parametrize("path", SOURCES, ids=relative)
def test_docstrings_do_not_say_what_a_module_does_not_know(path):
    texts = docstrings(ast.parse(path.read_text()))
    wrong = [
        line for line, text in texts if re.search(r"\bknows? (no|nothing|neither)\b", text, re.I)
    ]
    assert not wrong


def test_no_class_name_stands_for_two_things():
    places = defaultdict(list)
    for path in SOURCES:
        if relative(path) not in ERRORS:
            for node in ast.walk(ast.parse(path.read_text())):
                if isinstance(node, ast.ClassDef):
                    places[node.name].append(relative(path))
    assert not {name: where for name, where in places.items() if len(where) > 1}

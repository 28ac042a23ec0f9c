"""The source uses one name per thing, and no name that the project has dropped."""

import ast
import re
from collections import defaultdict
from pathlib import Path

ROOT = Path(__file__).parents[2]
SOURCES = sorted(
    path
    for package in (
        "model_hub",
        "rendezvous",
        "rpc_schema",
        "client",
        "worker_daemon",
        "worker_host",
    )
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


def relative(path):
    return path.relative_to(ROOT).as_posix()


def docstrings(tree):
    """Strings that are statements: docstrings, including those of attributes."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant):
            value = node.value.value
            if isinstance(value, str):
                yield node.lineno, value


def wrong_docstrings(is_wrong):
    """Return the docstrings of SOURCES for which is_wrong(text), by "file:line"."""
    return {
        f"{relative(path)}:{line}": text[:60]
        for path in SOURCES
        for line, text in docstrings(ast.parse(path.read_text()))
        if is_wrong(text)
    }


def test_no_word_that_was_given_up():
    given_up = re.compile(rf"(?<![a-z])({'|'.join(GIVEN_UP)})s?(?![a-z])")
    found = {
        (relative(path), word): GIVEN_UP[word]
        for path in [*SOURCES, *DOCUMENTS]
        for word in given_up.findall(path.read_text().lower())
    }
    assert not found


def test_docstrings_begin_with_what_a_thing_is_or_does():
    assert not wrong_docstrings(lambda text: text.split(" ", 1)[0] in OPENERS)


def test_docstrings_do_not_say_what_a_module_does_not_know():
    unknowing = re.compile(r"\bknows? (no|nothing|neither)\b", re.IGNORECASE)
    assert not wrong_docstrings(unknowing.search)


def test_no_class_name_stands_for_two_things():
    places = defaultdict(list)
    for path in SOURCES:
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.ClassDef):
                places[node.name].append(relative(path))
    assert not {name: where for name, where in places.items() if len(where) > 1}

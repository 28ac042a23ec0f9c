"""The documents name files, anchors and symbols that exist, their lines are of 110 columns at most,
and ARCHITECTURE.md is one page."""

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
LIVING = [path for path in ROOT.glob("*.md") if path.name != "CHANGELOG.md"]
LIVING += (ROOT / "docs").glob("*.md")
"""Documents that describe the current tree."""
DOCUMENTS = [*LIVING, ROOT / "CHANGELOG.md"]
DOCUMENTS += [path for name in ("benchmarks", "tests") for path in (ROOT / name).rglob("*.md")]
BASES = (ROOT, ROOT / "worker_daemon", ROOT / "client" / "worker_client")
SOURCES = (
    "worker_daemon",
    "worker_host",
    "client",
    "model_hub",
    "rendezvous",
    "rpc_schema",
    "tests",
    "docker",
)
MAX_ARCHITECTURE_WORDS = 1000
MAX_COLUMNS = 110
LONE_LINK = re.compile(r"\s*(?:[-*]|\d+\.)?\s*(?:<https?:\S+>|\[[^\]]*\]\(\S+\))[.,;:]?")

CODE = re.compile(r"`([^`\n]+)`")
SOURCE = re.compile(r"([\w./@-]+\.(?:py|toml|yaml|txt|service))(?::([\w.]+))?")
DIRECTORY = re.compile(r"[a-z_]+/(?:\w+/)*")
LINK = re.compile(r"\[[^\]]*\]\(([^)\s]+)\)")
PICTURE = re.compile(
    r"""<picture>
<source media="\(prefers-color-scheme: dark\)" srcset="(\S+)">
<img src="(\S+)" alt="([^"]*)">
</picture>"""
)
GIVEN_NAMES = {"models/families/seed_oss.py", "registry.py", "utils.py"}
"""Exceptions: a file for the reader to write, one located by its sentence, one that must not
exist."""


def ids(path):
    return path.relative_to(ROOT).as_posix()


def find(name):
    """Return the files or directories that a document may mean by a path."""
    exact = [base / name for base in BASES if (base / name).exists()]
    if exact or "/" in name:
        return exact
    return [path for base in SOURCES for path in (ROOT / base).rglob(name)]


def anchors(path):
    """Return GitHub's anchors for a document's headings."""
    headings = re.findall(r"^#+ (.*)$", path.read_text(), re.MULTILINE)
    plain = [re.sub(r"[^\w\s-]", "", heading.lower()) for heading in headings]
    return {heading.replace(" ", "-") for heading in plain}


@pytest.mark.parametrize("path", LIVING, ids=ids)
def test_named_files_and_symbols_exist(path):
    missing = []
    for code in CODE.findall(path.read_text()):
        if (match := SOURCE.fullmatch(code)) and code not in GIVEN_NAMES:
            files = find(match[1])
            symbols = (match[2] or "").split(".")
            if not any(all(has(file, name) for name in symbols if name) for file in files):
                missing.append(code)
        elif DIRECTORY.fullmatch(code) and not find(code.rstrip("/")):
            missing.append(code)
    assert not missing


def has(file, name):
    return re.search(rf"\b(?:class|def) {name}\b|^{name}\b", file.read_text(), re.MULTILINE)


@pytest.mark.parametrize("path", DOCUMENTS, ids=ids)
def test_links_lead_to_files_and_headings(path):
    broken = []
    for link in LINK.findall(path.read_text()):
        if link.startswith(("http://", "https://")):
            continue
        name, _, anchor = link.partition("#")
        target = (path.parent / name).resolve() if name else path
        if not target.exists() or (anchor and anchor not in anchors(target)):
            broken.append(link)
    assert not broken


@pytest.mark.parametrize("path", DOCUMENTS, ids=ids)
def test_pictures_are_there_on_light_and_dark_pages(path):
    for dark, light, alt in PICTURE.findall(path.read_text()):
        assert dark.replace("-dark.", "-light.") == light
        assert (path.parent / dark).is_file() and (path.parent / light).is_file()
        assert alt
    assert path.read_text().count("<picture>") == len(PICTURE.findall(path.read_text()))


def test_architecture_is_one_page():
    assert len((ROOT / "ARCHITECTURE.md").read_text().split()) <= MAX_ARCHITECTURE_WORDS


@pytest.mark.parametrize("path", DOCUMENTS, ids=ids)
def test_lines_fit_a_terminal(path):
    """But for tables, and for lines that are one link."""
    long = [
        f"line {number} has {len(line)} columns"
        for number, line in enumerate(path.read_text().splitlines(), 1)
        if len(line) > MAX_COLUMNS and line[:1] != "|" and not LONE_LINK.fullmatch(line)
    ]
    assert not long


def test_every_document_is_listed_in_the_readme():
    readme = (ROOT / "README.md").read_text()
    linked = {(ROOT / link.partition("#")[0]).resolve() for link in LINK.findall(readme)}
    assert set((ROOT / "docs").glob("*.md")) <= linked

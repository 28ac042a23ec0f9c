"""The files by which a forge knows the project: what they run is what CONTRIBUTING says, and what
they ask for exists."""

import re
import tomllib
from pathlib import Path

import pytest
import yaml

ROOT = Path(__file__).parents[2]
FORMS = sorted((ROOT / ".github" / "ISSUE_TEMPLATE").glob("[!c]*.yml"))


def read(name):
    return yaml.safe_load((ROOT / name).read_text())


def test_commits_are_checked_by_make_check_alone():
    (repository,) = read(".pre-commit-config.yaml")["repos"]
    (hook,) = repository["hooks"]
    assert repository["repo"] == "local"
    assert hook["entry"] == "make check"
    assert hook["always_run"] and not hook["pass_filenames"]
    assert "\ncheck:" in (ROOT / "Makefile").read_text()


def test_forge_runs_what_every_change_must_pass():
    workflow = read(".github/workflows/ci.yml")
    assert workflow[True].keys() == {"push", "pull_request"}, "YAML reads `on` as true"
    assert workflow["permissions"] == {"contents": "read"}
    (job,) = workflow["jobs"].values()
    (run,) = (step["run"] for step in job["steps"] if "run" in step)
    assert run == ".ci/run"
    assert (ROOT / run).stat().st_mode & 0o111
    (python,) = (s["with"] for s in job["steps"] if s.get("uses", "").startswith("actions/setup-p"))
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    assert f"Programming Language :: Python :: {python['python-version']}" in project["classifiers"]


@pytest.mark.parametrize("path", FORMS, ids=lambda path: path.name)
def test_issue_forms_ask_for_something(path):
    form = read(path.relative_to(ROOT))
    assert form["name"] and form["description"]
    asked = [field for field in form["body"] if field["type"] != "markdown"]
    assert len({field["id"] for field in asked}) == len(asked)
    assert any(field.get("validations", {}).get("required") for field in asked)


@pytest.mark.parametrize("path", sorted((ROOT / ".github").rglob("*.*")), ids=lambda p: p.name)
def test_files_that_are_named_exist(path):
    names = re.findall(
        r"(?<![\w./])(?:docs|benchmarks)/[\w./]+\w|\b[A-Z]{4,}\.md", path.read_text()
    )
    assert not [name for name in names if not (ROOT / name).exists()]


def test_addresses_are_left_out_with_a_reason():
    """Until there are some: SECURITY.md and pyproject.toml say so."""
    text = (ROOT / "pyproject.toml").read_text()
    assert tomllib.loads(text)["project"]["urls"] == {}
    assert re.search(r"\[project\.urls\]\n# Empty on purpose: ", text)

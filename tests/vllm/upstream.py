"""Runs vLLM's own tests, from its source distribution, on a daemon on a CPU, and compares
their outcomes with upstream.toml.

    python -m tests.vllm.upstream build/vllm/vllm-0.33.0.tar.gz [PART OF A PATH ...]
"""

import argparse
import os
import subprocess
import sys
import tarfile
import time
import tomllib
import xml.etree.ElementTree as ET
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from tests.vllm.serving import ROOT, start_daemons, vllm_environment
from tests.vllm.upstream_models import make_cache

LIST = Path(__file__).with_name("upstream.toml")
SITE = Path(__file__).with_name("upstream_site")
FILE_LIMIT_S = 1800
OPTIONS = (
    *("-q", "--timeout", "600"),
    *("-p", "no:cacheprovider", "-p", "without_accelerator"),
    *("-o", "asyncio_default_fixture_loop_scope=function"),
)
TEXTS = ("tests/prompts/example.txt", "tests/prompts/summary.txt")
WORDS = "Hello, my name is Robert and I. The capital of France is. The future of AI is. "


class Outcomes(NamedTuple):
    """What became of a file's tests, by name."""

    passed: set[str]
    failed: dict[str, str]
    """With the first line of each error."""
    skipped: dict[str, str]


def main() -> None:
    """Run the files that are asked for; exit with 1 if an outcome is not as listed."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("sdist", type=Path)
    parser.add_argument("parts", nargs="*", help="run only files whose path contains one of these")
    arguments = parser.parse_args()
    listed = tomllib.loads(LIST.read_text())
    build = arguments.sdist.resolve().parent
    source = _unpack(arguments.sdist, build, listed["version"])
    texts = [(source / name).read_text() for name in TEXTS]
    for change in listed["replace"]:
        _replace(source / change["path"], change["old"], change["new"])
    make_cache(build / "hf", listed["models"], [*texts, *[WORDS] * 20])
    wrong = 0
    for entry in listed["file"]:
        if arguments.parts and not any(part in entry["path"] for part in arguments.parts):
            continue
        began = time.monotonic()
        with start_daemons(1, build / "hf") as daemons:
            outcomes = _run(entry, source, build, daemons.endpoints)
        differences = compare(entry, outcomes)
        wrong += len(differences)
        counts = (
            f"{len(outcomes.passed)} passed, {len(outcomes.failed)} failed, "
            f"{len(outcomes.skipped)} skipped"
        )
        print(f"{entry['path']}: {counts}, {time.monotonic() - began:.0f} s", flush=True)
        for difference in differences:
            print(f"    {difference}", flush=True)
    sys.exit(1 if wrong else 0)


def compare(entry: Mapping[str, Any], outcomes: Outcomes) -> list[str]:
    """Return the differences between a file's entry and its outcomes."""
    differences = []
    for kind, got in (("failed", outcomes.failed), ("skipped", outcomes.skipped)):
        expected = entry.get(kind, {})
        differences += [f"{kind}, unlike listed: {n}: {got[n]}" for n in got if n not in expected]
        differences += [f"listed as {kind}, but is not: {n}" for n in expected if n not in got]
    if len(outcomes.passed) != entry["passed"]:
        differences.append(f"{len(outcomes.passed)} passed instead of {entry['passed']}")
    return differences


def _unpack(sdist: Path, build: Path, version: str) -> Path:
    """Unpack the tests, not the package: the installed one is tested."""
    source = build / f"vllm-{version}"
    with tarfile.open(sdist) as archive:
        wanted = (f"{source.name}/tests/", f"{source.name}/pyproject.toml")
        members = [each for each in archive.getmembers() if each.name.startswith(wanted)]
        archive.extractall(build, members, filter="data")
    return source


def _run(entry: Mapping[str, Any], source: Path, build: Path, endpoints: Sequence[str]) -> Outcomes:
    path = entry["path"]
    for change in entry.get("replace", ()):
        _replace(source / change.get("path", path), change["old"], change["new"])
    report = build / "reports" / f"{path.replace('/', '.')}.xml"
    report.parent.mkdir(exist_ok=True)
    report.unlink(missing_ok=True)
    not_run = [
        word for name in entry.get("not_run", ()) for word in ("--deselect", f"{path}::{name}")
    ]
    python_path = (str(SITE), str(ROOT), str(ROOT / "client"))
    environment = vllm_environment(
        endpoints,
        HF_HOME=str(build / "hf"),
        PATH=f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}",
        PYTHONPATH=os.pathsep.join(python_path),
        VLLM_SERVER_DEV_MODE="0",
        **entry.get("environment", {}),
    )
    with report.with_suffix(".log").open("wb") as log:
        done = subprocess.run(
            [sys.executable, "-m", "pytest", path, *OPTIONS, *not_run, f"--junitxml={report}"],
            cwd=source,
            env=environment,
            stdout=log,
            stderr=subprocess.STDOUT,
            timeout=FILE_LIMIT_S,
            check=False,
        )
    if not report.exists():
        return Outcomes(set(), {"": f"pytest ended with {done.returncode}: {log.name}"}, {})
    return read_report(report)


def _replace(file: Path, old: str, new: str) -> None:
    text = file.read_text()
    if new not in text:
        assert old in text, f"{file} has no {old!r}"
        file.write_text(text.replace(old, new))


def read_report(report: Path) -> Outcomes:
    """Read a JUnit report."""
    outcomes = Outcomes(set(), {}, {})
    for case in ET.parse(report).getroot().iter("testcase"):
        name = case.attrib["name"]
        problem = case.find("failure")
        if problem is None:
            problem = case.find("error")
        skip = case.find("skipped")
        if problem is not None:
            outcomes.failed[name] = problem.attrib.get("message", "").split("\n")[0][:200]
        elif skip is not None:
            outcomes.skipped[name] = skip.attrib.get("message", "")
        else:
            outcomes.passed.add(name)
    return outcomes


if __name__ == "__main__":
    main()

"""The commands that benchmarks start: their options are those of worker-client, and the checkouts
that they compare find what PYTHONPATH names."""

import os
import sys

import pytest
from typer.testing import CliRunner

from benchmarks import compare_steps
from benchmarks.e2e import group_options
from worker_client.__main__ import app
from worker_client.errors import ClientConfigError

CONTROL_PLANE = """
import only_on_the_path

from worker_client.steps.step_checks import WIRE_LIMITS as LIMITS
Requests = lambda size: type("Requests", (), {"admission": lambda self: None})()

def median_us(work, count):
    raise AssertionError

class DaemonGroup:
    def __init__(self, size, directory): pass
    def start(self, num_requests, all_ranks): pass
    def step(self, table, output): pass
    def close(self): pass
"""
"""benchmarks/control_plane.py of a checkout, without its daemons."""


@pytest.mark.parametrize("sizes", [(1, 1), (2, 1, "17,15"), (1, 2, "", ("--enforce-eager",))])
def test_options_of_a_group_are_options_of_worker_client(sizes, tmp_path):
    (tmp_path / "config.json").write_text("{}")
    command = ["bench", "--model", str(tmp_path), *group_options(*sizes)]
    with pytest.raises(ClientConfigError, match="nothing to generate for"):
        CliRunner().invoke(app, command, catch_exceptions=False)


def test_compared_checkouts_find_packages_of_the_path(tmp_path, monkeypatch):
    tree, site = tmp_path / "tree", tmp_path / "site"
    (tree / "benchmarks").mkdir(parents=True)
    (tree / "benchmarks" / "__init__.py").touch()
    (tree / "benchmarks" / "control_plane.py").write_text(CONTROL_PLANE)
    site.mkdir()
    (site / "only_on_the_path.py").touch()
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([str(site), *filter(None, sys.path)]))
    compare_steps.Side(tree, num_requests=1).close()


def test_more_rounds_than_there_are_blocks_for_are_refused(monkeypatch, capsys):
    words = ["compare_steps", ".", ".", "--requests", "1024", "--rounds", "20"]
    monkeypatch.setattr(sys, "argv", words)
    with pytest.raises(SystemExit):
        compare_steps.main()
    assert "1024 requests have no more blocks after 6300 steps" in capsys.readouterr().err

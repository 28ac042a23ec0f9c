"""The drivers of the adoption benchmark: when the first one is warm, and the error for one that
ends too early."""

import subprocess
import sys
from tempfile import TemporaryFile

import pytest

from benchmarks.adoption import WARM_TOKENS, Warmth, first_line
from worker_client.scheduler_output import StepResult


def test_driver_is_warm_though_no_step_holds_all_requests(capsys):
    """Alternating steps, as with two stages."""
    warmth = Warmth(4)
    halves = [StepResult(["0", "1"], [5, 6]), StepResult(["2", "3"], [7, 8])]
    for result in halves * WARM_TOKENS:
        assert capsys.readouterr().out == ""
        warmth(result)
    assert capsys.readouterr().out == "decoding\n"
    warmth(halves[0])
    assert capsys.readouterr().out == ""


def test_driver_that_ends_is_told_with_its_status_and_words():
    with TemporaryFile("w+") as errors:
        process = subprocess.Popen(
            [sys.executable, "-c", "raise SystemExit('no memory left')"],
            stdout=subprocess.PIPE,
            stderr=errors,
            text=True,
        )
        with pytest.raises(RuntimeError, match=r"first driver has ended with 1, .*no memory left"):
            first_line("first", process, errors)
        process.communicate()

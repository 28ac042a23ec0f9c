"""`worker-client demo` with drivers that are made up: what it kills, what it takes for an error,
and its exit code. tests/e2e/test_installed.py kills real processes."""

import contextlib
import json
import os
import signal
from functools import partial
from itertools import count

import pytest

from worker_client.cli import demo
from worker_client.cli.demo_driver import DriverReady, Finished, Lost, Replaced, StepTokens
from worker_client.cli.demo_model import make_demo_model

PIDS = [11, 12]


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    path = tmp_path_factory.mktemp("models") / "demo"
    make_demo_model(path)
    return path


class Daemons:
    """Local daemons that do not exist."""

    def __init__(self, devices, model_root):
        self.pids, self.seconds = PIDS[: len(devices)], {"spawn": 0.5}
        self.endpoints = [f"ipc://{model_root}/none/w{rank}" for rank in range(2)]

    def __enter__(self):
        return self

    def __exit__(self, *_):
        pass

    naming_causes = contextlib.nullcontext

    def restart_dead(self):
        pass


class Driver:
    """A driver whose requests gain a token each at a time, and are their numbers' tokens. The
    tokens of requests in `wrong` are others."""

    wrong: frozenset[str] = frozenset()

    def __init__(self, kills, plan):
        self.kills = kills
        self.plan, self.began, self.has_ended, self.pid = plan, 0.0, False, 40 + plan.adopt
        self._messages = self._told()

    def _told(self):
        lines = [json.loads(line) for line in self.plan.lines]
        clock = count(100)
        yield DriverReady(next(clock), 1.0, 2.0, self.plan.adopt * len(lines), 0)
        num_tokens = min((line["max_tokens"] for line in lines), default=0)
        for _ in range(num_tokens):
            if self.kills and self.kills.pop():
                yield Lost(next(clock), 1)
                yield Replaced(next(clock), {})
            yield StepTokens(next(clock), len(lines))
        for line in lines:
            is_wrong = self.plan.adopt and line["id"] in self.wrong
            yield Finished(line["id"], [int(line["id"])] * (num_tokens + is_wrong))

    def read(self, within_s):
        message = next(self._messages, None)
        self.has_ended = message is None
        return [] if message is None else [message]

    def kill(self):
        return []

    def close(self):
        pass


@pytest.fixture
def kills(monkeypatch):
    """The signals to daemons. They reach nobody."""
    sent, kill = [], os.kill

    def send(pid, number):
        if pid not in PIDS:
            return kill(pid, number)
        assert (pid, number) == (PIDS[-1], signal.SIGKILL)
        return sent.append(pid)

    monkeypatch.setattr(demo.os, "kill", send)
    return sent


@pytest.fixture
def show(model, run, monkeypatch):
    """show(*options, driver=...) -> exit code, standard output, standard error."""

    def call(*options, driver=None):
        monkeypatch.setattr(demo, "LocalDaemons", Daemons)
        if driver is not None:
            monkeypatch.setattr(demo, "DriverProcess", driver)
        return run("demo", "--model", model, "--device", "cpu", *options)

    return call


SMALL = ("--num-requests", 5, "--max-tokens", 4)


def test_same_tokens_are_success(show, kills):
    seen = []

    def start(plan):
        seen.extend(kills)
        return Driver(kills, plan)

    code, shown, errors = show(*SMALL, driver=start)
    assert (code, errors) == (0, "")
    assert not seen and not kills, "after the last driver's start, and it has noticed"
    assert "the next driver adopted 5 requests" in shown
    assert "rank 1 killed at" in shown and "successor" not in shown
    assert shown.count("20 of 5 requests") == 3 and "\nthe same tokens in each run\n" in shown


def test_other_tokens_are_shown_and_are_the_exit_code(show, kills, monkeypatch):
    monkeypatch.setattr(Driver, "wrong", frozenset({"3"}))
    code, shown, _ = show(*SMALL, driver=partial(Driver, kills))
    assert code == 1
    assert "\nDIFFERENT TOKENS\n" in shown
    assert "driver killed: request 3 from its token 4 on: 3 in place of None" in shown
    assert shown.count("  the same\n") == 1


def test_requests_that_end_before_the_kill_are_an_error(show, kills):
    class Hasty(Driver):
        def read(self, within_s):
            self.has_ended = True
            return list(self._messages)

        def kill(self):
            return list(self._messages)

    code, _, errors = show("--num-requests", 1, "--max-tokens", 2, driver=partial(Hasty, kills))
    assert code == 2 and "ended before anything could be killed" in errors
    assert "; fix: give more" in errors


def test_a_driver_that_fails_is_an_error_with_its_reason(show):
    """A real one, at endpoints where nobody listens."""
    code, _, errors = show()
    assert code == 2 and "Traceback" not in errors
    assert "LaunchError: the demo's driver has ended (exit code 2)" in errors
    assert "NothingListens" in errors


def test_a_model_without_texts_is_refused_before_anything_starts(run, tmp_path, monkeypatch):
    monkeypatch.setattr(demo, "LocalDaemons", None)
    for path, words in ((tmp_path / "none", "no such directory"), (tmp_path, "shows texts")):
        code, _, errors = run("demo", "--model", path, "--device", "cpu")
        assert code == 2 and words in errors and "; fix: " in errors

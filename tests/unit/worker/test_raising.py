"""Errors of ours in place of others keep nothing alive: no reference cycle is left for the garbage
collector."""

import gc
import weakref

import pytest

from worker_daemon.raising import Translation, raise_caused


class Held:
    """What a frame of a failure holds, as it would a communicator."""


@pytest.fixture(autouse=True)
def no_collector():
    gc.disable()
    yield
    gc.enable()


def translated():
    with Translation((OSError,), lambda error: ValueError(str(error))):
        fail()


def replaced():
    try:
        fail()
    except OSError as caught:
        raise_caused(ValueError(str(caught)), caught)


def kept():
    try:
        fail()
    except OSError as caught:
        raise_caused(caught, caught)


def fail():
    held = Held()
    fail.held = weakref.ref(held)
    raise OSError("gone")


def outcome(run):
    """(class of the error, class of its cause)."""
    try:
        run()
    except Exception as error:
        return type(error), type(error.__cause__)


@pytest.mark.parametrize(
    ("run", "expected"),
    [
        (translated, (ValueError, OSError)),
        (replaced, (ValueError, OSError)),
        (kept, (OSError, type(None))),
    ],
)
def test_failure_is_forgotten_with_its_error(run, expected):
    assert outcome(run) == expected
    assert fail.held() is None


def test_other_errors_pass_and_those_that_translate_leaves():
    with pytest.raises(KeyError), Translation((OSError,), lambda _: ValueError()):
        raise KeyError
    with pytest.raises(FileNotFoundError), Translation((OSError,), lambda _: None):
        raise FileNotFoundError

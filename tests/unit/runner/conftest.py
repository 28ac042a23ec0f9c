"""Tests copy a RequestState to try steps on: the copy gets locks of its own."""

import copyreg
import threading


def pytest_configure() -> None:
    copyreg.pickle(type(threading.Lock()), lambda _: (threading.Lock, ()))

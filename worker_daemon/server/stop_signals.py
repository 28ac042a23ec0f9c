"""SIGTERM and SIGINT: the first asks the daemon to end, the second ends it, whatever hangs.

Python handles a signal on the main thread, which may wait for the interpreter's lock for ever. So
each handler is installed for one delivery: from then on the kernel applies the signal's default
action, which ends the process and needs none of its threads. As long as the event loop runs, it
installs the handler again after the first signal, for an exit in order at the second.
"""

import asyncio
import ctypes
import signal
from collections.abc import Callable
from typing import Final

STALL_S: Final = 2.0
"""An event loop that drains, but has not run for this long, does not handle a second signal."""
_WATCH_S: Final = 0.5
_EXITING_S: Final = 3.0
"""Limit of the exit at the second signal, which removes files."""
_NUMBERS: Final = (signal.SIGTERM, signal.SIGINT)
_SA_RESETHAND: Final = 0x80000000
_CLOCK_MONOTONIC: Final = 1
_LIBC: Final = ctypes.CDLL(None, use_errno=True)


class _SignalAction(ctypes.Structure):
    """sigaction of glibc and musl."""

    _fields_ = (
        ("handler", ctypes.c_void_p),
        ("mask", ctypes.c_ubyte * 128),
        ("flags", ctypes.c_uint),
        ("restorer", ctypes.c_void_p),
    )


class _SignalEvent(ctypes.Structure):
    """sigevent, which sends a signal to the process."""

    _fields_ = (
        ("value", ctypes.c_void_p),
        ("signo", ctypes.c_int),
        ("notify", ctypes.c_int),
        ("rest", ctypes.c_ubyte * 48),
    )


class _TimerValue(ctypes.Structure):
    """itimerspec."""

    _fields_ = tuple((name, ctypes.c_long) for name in ("every_s", "every_ns", "in_s", "in_ns"))


class OneShotHandler:
    """The current handler of a signal, for one delivery at a time."""

    def __init__(self, number: int) -> None:
        self._number = number
        self._action = _SignalAction()
        _check(_LIBC.sigaction(number, None, ctypes.byref(self._action)))
        self._action.flags |= _SA_RESETHAND

    def install(self) -> None:
        """Let it take the next signal; those after that have the default action."""
        _check(_LIBC.sigaction(self._number, ctypes.byref(self._action), None))


class _StallTimer:
    """A timer of the kernel that sends this process a signal, unless it is restarted in time."""

    def __init__(self, number: int) -> None:
        self._id = ctypes.c_void_p()
        event = _SignalEvent(signo=number)
        _check(_LIBC.timer_create(_CLOCK_MONOTONIC, ctypes.byref(event), ctypes.byref(self._id)))
        self._set(STALL_S)

    def postpone(self) -> None:
        """Start it again, unless it has sent its signal."""
        if not self._set(STALL_S):
            self._set(0.0)

    def start_again(self) -> bool:
        """Start it again; return True if it had sent its signal."""
        return not self._set(STALL_S)

    def stop(self) -> None:
        """Stop it."""
        self._set(0.0)

    def _set(self, seconds: float) -> bool:
        """Return True if it was running."""
        new, old = _TimerValue(in_s=int(seconds), in_ns=int(seconds % 1 * 1e9)), _TimerValue()
        _check(_LIBC.timer_settime(self._id, 0, ctypes.byref(new), ctypes.byref(old)))
        return bool(old.in_s or old.in_ns)


def _check(result: int) -> None:
    if result != 0:
        raise OSError(ctypes.get_errno(), "a signal cannot be prepared")


class StopSignals:
    """Handles SIGTERM and SIGINT on the event loop. Owned by the main thread.

    Between the first signal and the end, the loop may stall with the handler installed. Then a
    timer sends the signal once. It takes the handler's place, so that a second signal, before or
    after it, has the default action; a loop that runs again recognizes the timer's signal.
    """

    def __init__(self, on_first: Callable[[str], None], on_second: Callable[[int], object]) -> None:
        """on_first(name of the signal) starts a shutdown; on_second(number) ends the process."""
        self._on_first = on_first
        self._on_second = on_second
        self._handlers: dict[int, OneShotHandler] = {}
        self._timers: dict[int, _StallTimer] = {}
        """Empty before the first signal."""

    def open(self, loop: asyncio.AbstractEventLoop) -> None:
        """Handle the signals from now on; called once, when the loop runs."""
        self._loop = loop
        for number in _NUMBERS:
            loop.add_signal_handler(number, self._received, number)
            self._handlers[number] = OneShotHandler(number)
            self._handlers[number].install()

    def _received(self, number: int) -> None:
        if not self._timers:
            self._await_second()
            self._on_first(signal.Signals(number).name)
        elif self._timers[number].start_again():
            self._handlers[number].install()
        else:
            signal.setitimer(signal.ITIMER_REAL, _EXITING_S)  # SIGALRM ends the process
            self._on_second(number)

    def _await_second(self) -> None:
        for number, handler in self._handlers.items():
            handler.install()
            self._timers[number] = _StallTimer(number)
        self._loop.call_later(_WATCH_S, self._watch)

    def _watch(self) -> None:
        """Show the timers that the loop runs."""
        for timer in self._timers.values():
            timer.postpone()
        self._loop.call_later(_WATCH_S, self._watch)

    def close(self) -> None:
        """Stop the timers: the loop ends, and the handlers with it."""
        for timer in self._timers.values():
            timer.stop()

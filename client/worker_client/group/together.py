"""Runs the same work for several groups at the same time, each on its own thread: a group's calls
block, and belong to one thread at a time."""

from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from typing import TypeVar

ResultT = TypeVar("ResultT")


def run_together(calls: Sequence[Callable[[], ResultT]]) -> list[Future[ResultT]]:
    """Make all calls at the same time; return their outcomes, in order, once all have ended. A
    single one is made on the caller's thread, and raises there."""
    if len(calls) == 1:
        ended: Future[ResultT] = Future()
        ended.set_result(calls[0]())
        return [ended]
    with ThreadPoolExecutor(len(calls), thread_name_prefix="replica") as pool:
        return [pool.submit(call) for call in calls]


def results_of(ended: Sequence[Future[ResultT]]) -> list[ResultT]:
    """Return the results of run_together, or raise the first error, with the others as notes."""
    errors = [error for error in (call.exception() for call in ended) if error is not None]
    if errors:
        for other in errors[1:]:
            errors[0].add_note(f"and in another replica: {other}")
        raise errors[0]
    return [call.result() for call in ended]

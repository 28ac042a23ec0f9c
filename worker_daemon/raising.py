"""Raises a typed error in place of another, without a reference cycle. A cycle keeps every frame of
the failure and its locals (works, groups, tensors) until the garbage collector runs, on any thread.
It is a class, not a generator, because since Python 3.12 a @contextmanager that raises another
exception leaves a cycle through its generator's frame."""

from collections.abc import Callable
from dataclasses import dataclass
from types import TracebackType
from typing import NoReturn


@dataclass(slots=True, eq=False)
class Translation:
    """A context that replaces exceptions. May be used once."""

    kinds: tuple[type[Exception], ...]
    """Types of the exceptions to translate."""
    translate: Callable[[Exception], Exception | None]
    """Returns the exception to raise instead; None lets the original pass."""

    def __enter__(self) -> None:
        return None

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        if not isinstance(error, self.kinds):
            return
        ours = self.translate(error)
        if ours is not None:
            try:
                raise ours from error
            finally:
                del ours  # this frame is in its traceback


def raise_caused(failure: Exception, cause: Exception) -> NoReturn:
    """Raise the failure from its cause, or as it is if both are the same exception: an exception
    that is its own cause would be a reference cycle as well."""
    try:
        if failure is cause:
            raise failure
        raise failure from cause
    finally:
        del failure, cause  # this frame is in their traceback

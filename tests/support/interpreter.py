"""Triton's interpreter, less slow: for the processes that run kernels under it.

At each call of one jit function by another, Triton 3.9 looks through all of triton.language again
for builtins to replace, though the launch that is under way has replaced them already: a third of
the run time. Other versions may have no such function; they are left as they are.
"""

import inspect
from collections.abc import Callable
from typing import Protocol

import pytest
from triton.runtime import interpreter


class Scope(Protocol):
    """What Triton returns from a replacement; None in versions that keep no scope."""

    def restore(self) -> None: ...


class PatchOnce:
    """Stands in for the interpreter's `_patch_lang(fn)`."""

    def __init__(self, patch_lang: Callable[[object], Scope]) -> None:
        self._patch_lang = patch_lang
        self._patched: set[str] = set()
        self._launch: Scope | None = None

    def __call__(self, fn: object) -> Scope | None:
        """Replace what no function of this launch has had replaced; a launch's first call makes the
        scope that ends it."""
        langs = {
            value.__name__
            for value in fn.__globals__.values()
            if inspect.ismodule(value) and value.__name__.startswith("triton.language")
        }
        if self._launch is None:
            self._launch = self._patch_lang(fn)
            self._patched = langs
            return self
        if not langs <= self._patched:
            self._patched |= langs
            self._patch_lang(fn)
        return None

    def restore(self) -> None:
        """The launch has ended."""
        launch, self._launch = self._launch, None
        self._patched = set()
        launch.restore()


def speed_up(patch: pytest.MonkeyPatch) -> None:
    """Do so until `patch` is undone, where this Triton is the one that we know."""
    if hasattr(interpreter, "_LangPatchScope") and hasattr(interpreter, "_patch_lang"):
        patch.setattr(interpreter, "_patch_lang", PatchOnce(interpreter._patch_lang))

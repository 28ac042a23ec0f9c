"""Speeds up Triton's interpreter, for processes that run kernels under it.

At each call of one jit function by another, Triton 3.9 searches all of triton.language again for
builtins to replace, although the running launch has replaced them already. That takes a third of
the run time. Other versions may lack this function and are not changed.
"""

import inspect
from collections.abc import Callable
from typing import Protocol

import pytest
from triton.runtime import interpreter


class Scope(Protocol):
    """Return value of Triton's replacement; None in versions without scopes."""

    def restore(self) -> None: ...


class PatchOnce:
    """Replaces the interpreter's `_patch_lang(fn)`."""

    def __init__(self, patch_lang: Callable[[object], Scope]) -> None:
        self._patch_lang = patch_lang
        self._patched: set[str] = set()
        self._launch: Scope | None = None

    def __call__(self, fn: object) -> Scope | None:
        """Replace builtins that this launch has not replaced yet; its first call returns the scope
        that ends it."""
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
        """End the launch."""
        launch, self._launch = self._launch, None
        self._patched = set()
        launch.restore()


def speed_up(patch: pytest.MonkeyPatch) -> None:
    """Apply the speed-up until `patch` is undone, if this Triton has the known function."""
    if hasattr(interpreter, "_LangPatchScope") and hasattr(interpreter, "_patch_lang"):
        patch.setattr(interpreter, "_patch_lang", PatchOnce(interpreter._patch_lang))

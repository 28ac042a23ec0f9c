"""Speeds up Triton's interpreter, for processes that run kernels under it, and lets it round to FP8
as devices do.

At each call of one jit function by another, Triton 3.9 searches all of triton.language again for
builtins to replace, although the running launch has replaced them already. At each operation, it
makes a table of dtypes, wraps each extent of a shape in objects anew, and computes in int64 whether
an integer overflows, for an assertion that only `debug` turns on. All that takes most of the run
time. Other versions may lack these functions and are not changed.
"""

import dataclasses
import inspect
from collections.abc import Callable, Sequence
from typing import Protocol

import numpy as np
import pytest
import torch
import triton.language as tl
from triton.runtime import interpreter


class Scope(Protocol):
    """Return value of Triton's replacement; None in versions without scopes."""

    def restore(self) -> None: ...


class PatchOnce:
    """Replaces the interpreter's `_patch_lang(fn)`."""

    def __init__(self, patch_lang: Callable[[object], Scope]) -> None:
        self._patch_lang = patch_lang
        self._patched: set[str] = set()
        self._langs: dict[str, set[str]] = {}
        self._launch: Scope | None = None

    def __call__(self, fn: object) -> Scope | None:
        """Replace builtins that this launch has not replaced yet; its first call returns the scope
        that ends it."""
        langs = self._langs.get(fn.__module__)
        if langs is None:
            langs = self._langs[fn.__module__] = {
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


class NumpyDtypes:
    """Replaces the interpreter's `_get_np_dtype(dtype)`."""

    def __init__(self, find: Callable[[tl.dtype], np.dtype]) -> None:
        self._find = find
        self._found: dict[str, np.dtype] = {}

    def __call__(self, dtype: tl.dtype) -> np.dtype:
        """Return the dtype of the elements in numpy."""
        element = dtype.scalar
        found = self._found.get(element.name)
        if found is None:
            found = self._found[element.name] = self._find(element)
        return found


class Shapes:
    """Replaces `block_type.__init__` and `tensor.__init__` of triton.language by ones that wrap a
    shape's extents once. Types and tensors share the wrapped shapes, which nothing changes."""

    def __init__(self) -> None:
        self._of_types: dict[tuple[int, ...], tuple[tl.tuple, int]] = {}
        self._of_tensors: dict[tuple[int, ...], tuple[tl.tuple, tl.constexpr]] = {}
        self._check_type = tl.block_type.__init__
        self._check_tensor = tl.tensor.__init__

    def init_type(self, block: tl.block_type, element_ty: tl.dtype, shape: Sequence[int]) -> None:
        """Make a type as the original does, which checks each shape once."""
        extents = tuple(getattr(extent, "value", extent) for extent in shape)
        found = self._of_types.get(extents)
        if found is None:
            self._check_type(block, element_ty, shape)
            self._of_types[extents] = block.shape, block.numel
            return
        block.element_ty = element_ty
        block.shape, block.numel = found
        block.name = f"<{extents}, {element_ty}>"

    def init_tensor(self, tensor: tl.tensor, handle: object, type: tl.dtype) -> None:
        """Make a tensor as the original does."""
        extents = tuple(type.shape.values) if type.is_block() else ()
        found = self._of_tensors.get(extents)
        if found is None:
            self._check_tensor(tensor, handle, type)
            self._of_tensors[extents] = tensor.shape, tensor.numel
            return
        tensor.handle, tensor.type, tensor.dtype = handle, type, type.scalar
        tensor.shape, tensor.numel = found


def speed_up(patch: pytest.MonkeyPatch) -> None:
    """Apply the speed-ups until `patch` is undone, if this Triton has the known functions."""
    if hasattr(interpreter, "_LangPatchScope") and hasattr(interpreter, "_patch_lang"):
        patch.setattr(interpreter, "_patch_lang", PatchOnce(interpreter._patch_lang))
    if hasattr(interpreter, "_get_np_dtype"):
        patch.setattr(interpreter, "_get_np_dtype", NumpyDtypes(interpreter._get_np_dtype))
    if all(hasattr(tl.core, name) for name in ("tuple", "tuple_type", "constexpr_type")):
        shapes = Shapes()
        patch.setattr(tl.block_type, "__init__", lambda *given: shapes.init_type(*given))
        patch.setattr(tl.tensor, "__init__", lambda *given: shapes.init_tensor(*given))
    builder = interpreter.interpreter_builder
    if hasattr(builder.options, "sanitize_overflow") and not builder.options.debug:
        options = dataclasses.replace(builder.options, sanitize_overflow=False)
        patch.setattr(builder, "options", options)


def round_to_fp8(patch: pytest.MonkeyPatch) -> None:
    """Let torch round float32 to float8_e4m3fn until `patch` is undone: the interpreter cuts bits
    off, and a significand that it rounds up does not carry into the exponent."""
    convert = interpreter._convert_float

    def convert_float(
        values: np.ndarray, given: tl.dtype, wanted: tl.dtype, rounding_mode: object
    ) -> np.ndarray:
        if (given, wanted) != (tl.float32, tl.float8e4nv):
            return convert(values, given, wanted, rounding_mode)
        rounded = torch.from_numpy(values.astype(np.float32)).to(torch.float8_e4m3fn)
        return rounded.view(torch.uint8).numpy()

    patch.setattr(interpreter, "_convert_float", convert_float)

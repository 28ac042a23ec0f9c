"""Programmatic dependent launch: a kernel starts while the previous one in the stream still runs.

A participating kernel has a constexpr `PDL`, calls `start_next(PDL)` first and
`await_previous(PDL)` before it reads or writes anything that another kernel of the step touches,
and is launched with `**launch_options(pdl)`. The object that owns the launches sets pdl once, to
`has_dependent_launch(device)`. Source: CUDA C++ Programming Guide, "Programmatic Dependent Launch
and Synchronization".
"""

# Parameters of a Triton kernel are pointers and scalars that Python's types cannot name:
# mypy: disable-error-code="no-untyped-def"

from typing import TypedDict

import torch
import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

HOPPER = (9, 0)
_ROW_ELEMENTS_PER_THREAD = 8
_LEAST_ROW_WARPS, _MOST_ROW_WARPS = 4, 16


class LaunchOptions(TypedDict, total=False):
    """Keyword arguments of a Triton launch."""

    launch_pdl: bool


def has_dependent_launch(device: torch.device) -> bool:
    """Return True if the device supports it: CUDA devices from Hopper on."""
    return device.type == "cuda" and torch.cuda.get_device_capability(device) >= HOPPER


def launch_options(pdl: bool) -> LaunchOptions:
    """Return the launch options that match the PDL constexpr."""
    return {"launch_pdl": True} if pdl else {}


def row_warps(block: int) -> int:
    """Return the warps of a program that holds a row of `block` elements, or words."""
    return min(max(block // (32 * _ROW_ELEMENTS_PER_THREAD), _LEAST_ROW_WARPS), _MOST_ROW_WARPS)


@triton.jit
def start_next(PDL: tl.constexpr):
    """Let the next kernel start once every program of this kernel has called this or ended.

    The next kernel's await_previous still waits for all of this kernel, so the call is safe
    anywhere. If called first, it lets the next kernel's programs load data that does not depend on
    the step (weights) as soon as the device has room for them.
    """
    if PDL:
        gdc_launch_dependents()


@triton.jit
def await_previous(PDL: tl.constexpr):
    """Wait until the previous kernels have ended and their writes are visible.

    Every program of a kernel with dependent launch must call this, even if it has no work: the next
    kernel relies on this kernel's end implying its predecessors' ends. Writes must come after it
    too, since an earlier kernel may still read the buffer.

    Before it, a kernel may read only weights, a step's columns, the block table, and keys and
    values cached by earlier steps. The launches that copy the columns, write the table and gather
    the tokens wait for all previous kernels. The gather comes after the other two (and the previous
    steps), and before every kernel with dependent launch.

    If the previous kernel calls start_next only after its await_previous, a kernel may also read
    what earlier kernels than that wrote, with loads that bypass L1 (experts.py's _row_down_kernel).
    """
    if PDL:
        gdc_wait()

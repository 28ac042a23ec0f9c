"""Programmatic dependent launch: a kernel starts while the one before it in the stream still runs.

Must not know any kernel. How a kernel of ours takes part: it has a constexpr `PDL`, calls
`start_next(PDL)` first and `await_previous(PDL)` before it reads or writes anything that another
kernel of the step touches, and is launched with `**launch_options(pdl)`, where pdl is
`has_dependent_launch(device)`, asked once by the object that owns the launches. Source: CUDA C++
Programming Guide, "Programmatic Dependent Launch and Synchronization".
"""

# Parameters of a Triton kernel are pointers and scalars that Python's types cannot name:
# mypy: disable-error-code="no-untyped-def"

from typing import TypedDict

import torch
import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

HOPPER = (9, 0)


class LaunchOptions(TypedDict, total=False):
    """Keyword arguments of a Triton launch."""

    launch_pdl: bool


def has_dependent_launch(device: torch.device) -> bool:
    """Whether kernels on this device may be launched so: CUDA devices from Hopper on."""
    return device.type == "cuda" and torch.cuda.get_device_capability(device) >= HOPPER


def launch_options(pdl: bool) -> LaunchOptions:
    """What a launch passes beside its PDL constexpr, so that the two always agree."""
    return {"launch_pdl": True} if pdl else {}


@triton.jit
def start_next(PDL: tl.constexpr):
    """Let the next kernel start once every program of this one has come here or ended.

    It only starts: its await_previous still waits for all of this kernel, so the call is safe
    anywhere. Called first, the next kernel's programs load what depends on no step (weights) as
    soon as they find room beside this kernel's.
    """
    if PDL:
        gdc_launch_dependents()


@triton.jit
def await_previous(PDL: tl.constexpr):
    """Wait until the kernels before this one have ended and what they wrote can be seen.

    Every program of a kernel launched with dependent launch calls this, even one that has nothing
    to do: the kernel after it relies on this kernel's end implying its predecessors' ends. Writes
    come after it too: an earlier kernel may still read the buffer.

    What may be read before it: weights, a step's columns, the block table, and keys and values that
    earlier steps cached. The columns are copied and the table is written by launches that wait for
    all before them, and so does the one that gathers the tokens, which comes between them (and the
    steps before) and every kernel that is launched so.
    """
    if PDL:
        gdc_wait()

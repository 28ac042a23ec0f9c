"""Names of the experts' tensors. Checkpoints hold each expert's matrices as tensors of their own,
under two families' names, or stacked over experts; both are read as separate tensors with one form
of name:

    ...mlp.experts.N.gate_proj.weight, up_proj, down_proj     [I, H], [I, H], [H, I]

Stacked, as transformers 5 has them in memory and may save them, are ...mlp.experts.gate_up_proj
[E, 2 I, H], each expert's gate before its up, and ...mlp.experts.down_proj [E, H, I]. In row-major
order a stacked tensor is the separate ones, one after another, so that each has its own bytes in
the file.
"""

import re
from collections.abc import Iterator
from types import MappingProxyType
from typing import Final, NamedTuple

MAX_EXPERTS: Final = 1024
"""Experts of a layer: more than any model has; a bound on a hostile file's tensors."""
_MIXTRAL_BLOCK: Final = ".block_sparse_moe."
_MIXTRAL_NAMES: Final = MappingProxyType(
    {
        ".w1.weight": ".gate_proj.weight",
        ".w3.weight": ".up_proj.weight",
        ".w2.weight": ".down_proj.weight",
    }
)
_STACKED: Final = MappingProxyType(
    {
        ".mlp.experts.gate_up_proj": ("gate_proj", "up_proj"),
        ".mlp.experts.down_proj": ("down_proj",),
    }
)
_SEPARATE: Final = re.compile(r"(.+\.mlp\.experts)\.(\d+)\.(gate_proj|up_proj|down_proj)\.weight")


def plain_expert_name(name: str) -> str:
    """Return the name in the form above; other names are returned as they are."""
    if _MIXTRAL_BLOCK not in name:
        return name
    name = name.replace(_MIXTRAL_BLOCK, ".mlp.", 1)
    for theirs, ours in _MIXTRAL_NAMES.items():
        name = name.removesuffix(theirs) + ours if name.endswith(theirs) else name
    return name


def is_stacked(name: str) -> bool:
    """Return True if a name is that of a stacked tensor."""
    return name.endswith(tuple(_STACKED))


def is_stack_of_experts(parameter: str) -> bool:
    """Return True for the name of a parameter with the matrices of a layer's experts."""
    return is_stacked(parameter.removesuffix(".weight"))


def is_of_expert(name: str) -> bool:
    """Return True if a name is that of one expert's tensor."""
    return _SEPARATE.fullmatch(name) is not None


class StackedPart(NamedTuple):
    """The place of one expert's tensor in a stacked one."""

    name: str
    """Name of the stacked tensor."""
    expert: int
    half: int
    """1 for an up, which follows the gate's rows; otherwise 0."""
    halves: int
    """Matrices of an expert in the stacked tensor."""


def stacked_part(name: str) -> StackedPart | None:
    """Return the place of a tensor in the stacked one; None if it is not an expert's."""
    matched = _SEPARATE.fullmatch(name)
    if matched is None:
        return None
    prefix, expert, matrix = matched.groups()
    stacked = "down_proj" if matrix == "down_proj" else "gate_up_proj"
    halves = 1 if stacked == matrix else 2
    return StackedPart(f"{prefix}.{stacked}", int(expert), int(matrix == "up_proj"), halves)


def separate_parts(
    name: str, shape: tuple[int, ...]
) -> Iterator[tuple[str, tuple[int, int]]] | None:
    """Return names and shapes of the tensors that are stacked in this one, in the order of their
    bytes, all of equal size; None if it is not a stacked one, or has an impossible shape."""
    matrices = next((parts for end, parts in _STACKED.items() if name.endswith(end)), None)
    if matrices is None or len(shape) != 3 or not 0 < shape[0] <= MAX_EXPERTS:
        return None
    num_experts, rows, columns = shape
    if rows % len(matrices) or not rows or not columns:
        return None
    prefix = name.rpartition(".")[0]
    each = (rows // len(matrices), columns)
    return (
        (f"{prefix}.{expert}.{matrix}.weight", each)
        for expert in range(num_experts)
        for matrix in matrices
    )

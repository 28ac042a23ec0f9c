"""Names of experts' tensors, and the place of each in a tensor that stacks them.

The canonical names are ...mlp.experts.N.gate_proj.weight and up_proj [I, H], and down_proj [H, I];
Mixtral's are translated (plain_expert_name). transformers 5 holds them stacked in memory, and may
save them so: ...mlp.experts.gate_up_proj [E, 2 I, H], each expert's gate before its up, and
down_proj [E, H, I].

Some families' checkpoints always stack them (layers/expert_pieces.py). An expert's part of their
...mlp.experts.NAME is ...mlp.experts.N.NAME.

A stacked tensor is row-major, so the bytes of one expert are contiguous in the file.
"""

import re
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
_STACKS: Final = (".mlp.experts.gate_up_proj", ".mlp.experts.down_proj")
_SEPARATE: Final = re.compile(r"(.+\.mlp\.experts)\.(\d+)\.(gate_proj|up_proj|down_proj)\.weight")
_STACKED: Final = re.compile(
    r"(.+\.mlp\.experts)\.(\d+)\.((?:gate_up_proj|down_proj)(?:_blocks|_scales)?)"
)


def plain_expert_name(name: str) -> str:
    """Return the name in the form above; other names are returned as they are."""
    if _MIXTRAL_BLOCK not in name:
        return name
    name = name.replace(_MIXTRAL_BLOCK, ".mlp.", 1)
    for theirs, ours in _MIXTRAL_NAMES.items():
        name = name.removesuffix(theirs) + ours if name.endswith(theirs) else name
    return name


def is_stack_of_experts(parameter: str) -> bool:
    """Return True for the name of a parameter with the matrices of a layer's experts."""
    return parameter.removesuffix(".weight").endswith(_STACKS)


class StackedPart(NamedTuple):
    """The place of one expert's tensor in a stacked one."""

    name: str
    """Name of the stacked tensor."""
    expert: int
    half: int = 0
    """1 for an up, which follows the gate's rows; otherwise 0."""
    halves: int = 1
    """Matrices of an expert in the stacked tensor."""
    is_always_stacked: bool = False
    """No checkpoint has a tensor of this one expert."""

    def shape_in(self, stack: tuple[int, ...]) -> tuple[int, ...] | None:
        """Return the shape of the expert's tensor in a stack of this shape; None if the stack has
        no such expert, or does not consist of such tensors."""
        if len(stack) < 3 or not self.expert < stack[0] <= MAX_EXPERTS or stack[1] % self.halves:
            return None
        return (stack[1] // self.halves, *stack[2:])


def stacked_part(name: str) -> StackedPart | None:
    """Return the place of a tensor in the stacked one; None if it is not an expert's."""
    if matched := _SEPARATE.fullmatch(name):
        prefix, expert, matrix = matched.groups()
        stacked = "down_proj" if matrix == "down_proj" else "gate_up_proj"
        halves = 1 if stacked == matrix else 2
        return StackedPart(f"{prefix}.{stacked}", int(expert), int(matrix == "up_proj"), halves)
    if matched := _STACKED.fullmatch(name):
        prefix, expert, matrix = matched.groups()
        return StackedPart(f"{prefix}.{matrix}", int(expert), is_always_stacked=True)
    return None

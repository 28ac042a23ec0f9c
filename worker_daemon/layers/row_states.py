"""Reads and writes the states of a step's requests, in the memory of a layer that keeps them.

Shapes: S request rows and a spare one, C checkpoints, B sequences of the step, padding included.
"""

import torch
from torch import Tensor

from worker_daemon.contracts.attention import AttentionMetadata, AttentionStep


def states_before(states: Tensor, step: AttentionStep) -> Tensor:
    """Return the states [B, *shape] with which the step's sequences begin. states [S + 1 + C,
    *shape].

    A sequence whose first token is at position 0 begins with zeros, and one whose first token is at
    a border with the checkpoint there, whatever its row holds: that may be the state of the row's
    former request, or one that a failed step has left behind. All requests begin at such a
    position, also when they are admitted again. Never waits for the device.
    """
    first = step.metadata.query_start_loc[:-1].long().clamp_max(step.positions.shape[0] - 1)
    is_new = step.positions.index_select(0, first) == 0
    slots = step.metadata.state_slots
    sources = step.metadata.seq_rows.long() if slots is None else slots.sources
    held = states.index_select(0, sources)
    return torch.where(_like_rows(is_new, held), 0, held)


def store_states(states: Tensor, metadata: AttentionMetadata, new: Tensor) -> None:
    """Write the states [B, *shape] after the step into states [S + 1 + C, *shape], and those of
    sequences that end at a border into its checkpoint too. Sequences without tokens keep theirs.
    Never waits for the device."""
    rows, starts = metadata.seq_rows.long(), metadata.query_start_loc
    has_tokens = starts[1:] > starts[:-1]
    kept = states.index_select(0, rows)
    states.index_copy_(0, rows, torch.where(_like_rows(has_tokens, new), new, kept))
    if metadata.state_slots is not None:
        states.index_copy_(0, metadata.state_slots.targets, new)


def _like_rows(column: Tensor, rows: Tensor) -> Tensor:
    """Return column [B] with the dimensions of rows [B, *shape]."""
    return column.view(-1, *[1] * (rows.dim() - 1))

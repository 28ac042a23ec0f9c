"""Estimates the memory of the largest step on a GPU, in addition to weights and KV cache. Pure
arithmetic.

Adds up the live tensors at the peak of a step: in a layer's attention or MLP, or when the last
stage samples tokens and reports logprobs. MARGIN_DIVISOR adds a share for the kernels' workspaces.

Letters: N tokens, H hidden size, R samples, V vocabulary.
"""

from dataclasses import dataclass
from typing import Final

from worker_daemon.layers.prompt_attention import LONG_CONTEXT, MIN_LATER_TOKENS, MIN_TOKENS
from worker_daemon.runner.parts.registry import PARTS
from worker_daemon.runner.parts.step_parts import with_columns
from worker_daemon.runner.scheduled_step import StepLimits
from worker_daemon.runner.step_layout import largest_shape, packed_size

MARGIN_DIVISOR: Final = 20
"""The estimate adds one part in this many to the sum, for kernels' workspaces and rounding."""

_ALIVE_IN_LAYER: Final = 4
"""[N, H] tensors alive throughout a layer: the last layer's output (its part and its residual
stream), this layer's residual stream and its normed input."""
_TRAILER_BYTES: Final = 16
_INT32: Final = 4
_INT64: Final = 8


@dataclass(frozen=True, slots=True)
class StageWidths:
    """The sizes of one rank's stage that determine a step's memory. Sizes are this rank's, in
    elements of the model's dtype, unless stated otherwise."""

    hidden_size: int
    """Hidden size of the whole model."""
    projected_size: int
    """Largest result of a layer's input projections for a token: query, key and value heads."""
    mixed_size: int
    """Largest input of a layer's output projection for a token: query heads."""
    inner_size: int
    """Inner size of the widest MLP that every token runs through; 0 if there is none."""
    vocab_size: int
    """Vocabulary of the whole model."""
    vocab_rows: int
    """Rows of the LM head, padding included."""
    itemsize: int
    """Bytes of an element."""
    pp_size: int
    tp_size: int
    is_first_stage: bool
    is_last_stage: bool
    gathered_size: int = 0
    """Key and value heads of a token, which a long prompt gathers (layers/prompt_attention.py); 0
    if no layer keeps them."""
    routed_size: int = 0
    """Inner values and results of a token's experts (kernels/experts.py); 0 without experts."""
    padded_size: int = 0
    """Inner values of the padding rows in all tiles of a step's experts; 0 without experts."""
    num_replicas: int = 1
    """Replicas whose tokens a rank's experts compute."""
    has_shared_expert: bool = False
    """The sum of a token's experts is alive while it passes the shared one."""
    dequantized_bytes: int = 0
    """Bytes of the largest matrix that a step dequantizes, and of its scales; 0 if it dequantizes
    none."""
    expert_load_bytes: int = 0
    """Bytes of the expert load counters, and of the tables of slots."""
    chosen_bytes: int = 0
    """Bytes of a token's experts, if they are kept for requests that ask for them."""


def estimate_step_bytes(widths: StageWidths, limits: StepLimits) -> int:
    """Return the peak bytes of the largest step within the limits, with the runner's tables and
    buffers."""
    rows = limits.max_num_seqs
    tokens = min(limits.max_num_batched_tokens, rows * limits.max_model_len)
    samples = limits.max_num_samples
    sampling = _sampling_bytes(widths, tokens, samples) if widths.is_last_stage else 0
    fewest = MIN_TOKENS if limits.max_model_len < LONG_CONTEXT else MIN_LATER_TOKENS
    is_long = min(tokens, limits.max_model_len) >= fewest
    gathered = widths.gathered_size * limits.max_model_len if is_long else 0
    peak = max(_layer_bytes(widths, tokens, gathered) + widths.dequantized_bytes, sampling)
    total = peak + _table_bytes(limits) + _neighbour_bytes(widths, limits, tokens)
    if widths.is_last_stage:
        total += _logits_bytes(widths, limits)
        total += (rows + 1) * sum(part.sampling_row_bytes(limits.vocab_size) for part in PARTS)
    total += 2 * _INT64 * tokens * limits.num_groups  # the step's token ids and KV slots
    total += widths.expert_load_bytes + widths.chosen_bytes * tokens
    return total + total // MARGIN_DIVISOR


def _layer_bytes(widths: StageWidths, tokens: int, gathered: int) -> int:
    """Return the peak of a layer: the larger of attention and MLP, each before its output is
    added. gathered: elements of gathered keys and values."""
    hidden = widths.hidden_size
    attention = tokens * (widths.projected_size + widths.mixed_size + hidden) + gathered
    # Attention's output stays alive during the MLP, whose inner size counts twice and then once
    # more.
    beside = hidden if widths.has_shared_expert else 0
    whole = beside + max(3 * widths.inner_size, widths.inner_size + hidden)
    routed = widths.routed_size + hidden
    if widths.num_replicas > 1:  # with the message of all ranks, its tokens, and their sums
        routed = widths.num_replicas * (routed + 2 * hidden)
    mlp = hidden + max(whole, routed)
    return (
        tokens * _ALIVE_IN_LAYER * hidden + max(attention, tokens * mlp + widths.padded_size)
    ) * widths.itemsize


def _logits_bytes(widths: StageWidths, limits: StepLimits) -> int:
    """Return the bytes of the buffer for a step's logits on this rank (runner/stage_program.py),
    and of the rows that wait for their sampling: those of at most max_num_seqs requests
    (runner/step_checker.py)."""
    waiting = limits.max_num_seqs * limits.most_samples_per_seq
    rows = largest_shape(limits).num_samples + waiting
    return rows * widths.vocab_rows * widths.itemsize


def _sampling_bytes(widths: StageWidths, tokens: int, rows: int) -> int:
    """Return the bytes that sampling takes beside the buffer of logits: all rows' logits, if ranks
    share them, and the larger of their gathering and the parts of a step."""
    gathered = rows * widths.vocab_rows * widths.tp_size * widths.itemsize
    if widths.tp_size == 1:
        gathered = 0  # they are the buffer's
    sizes = [part.sampling_bytes(rows, widths.vocab_size, widths.itemsize) for part in PARTS]
    parts = sum(sorted(sizes)[-2:])  # a part's logits are freed once the next part's exist
    hidden = (tokens + 2 * rows) * widths.hidden_size * widths.itemsize
    return hidden + gathered + max(gathered, parts)


def _table_bytes(limits: StepLimits) -> int:
    """Return the bytes of the row tables, and of the buffer for a step's columns
    (runner/input_batch.py:staging_capacity)."""
    num_rows = limits.max_num_seqs + 1
    own = sum(part.row_bytes() for part in PARTS)
    blocks = limits.num_groups * limits.max_blocks_per_seq
    table = num_rows * (_INT32 * blocks + own + _INT64 * (1 + limits.max_drafts))
    return table + _INT32 * packed_size(with_columns(largest_shape(limits), PARTS))


def _neighbour_bytes(widths: StageWidths, limits: StepLimits, tokens: int) -> int:
    """Return the bytes of messages from and to the neighboring stages: a buffer for each step in
    flight and two more, and the hidden states that a stage's ranks gather from theirs."""
    if widths.pp_size == 1:
        return 0
    num_slices = widths.tp_size if widths.hidden_size % widths.tp_size == 0 else 1
    row_bytes = widths.hidden_size * widths.itemsize
    message = limits.max_num_batched_tokens * row_bytes // num_slices + 2 * _TRAILER_BYTES
    num_neighbours = (not widths.is_first_stage) + (not widths.is_last_stage)
    gathers = num_slices > 1 and not widths.is_first_stage
    return num_neighbours * (widths.pp_size + 2) * message + gathers * tokens * row_bytes

"""Reads a RecomputeRequests, and plans its forward passes: from the message alone, so that all
ranks run the same ones, and know those of other replicas. Pure."""

from collections.abc import Iterator
from itertools import zip_longest
from typing import Final, NamedTuple

import numpy as np

from rpc_schema.errors import InvalidStepError
from rpc_schema.weight_transfer import RecomputeRequests
from worker_daemon.contracts.arrays import Int32s, Int64s
from worker_daemon.runner.request_state import RequestState
from worker_daemon.runner.scheduled_step import (
    NO_STEP_VALUES,
    NO_UPDATES,
    ScheduledStep,
    TokensOfReplicas,
)

_COLUMNS: Final = 4


class RecomputedRows(NamedTuple):
    """The rows of a message. Aligned columns [n]."""

    slots: Int32s
    """Ascending."""
    firsts: Int32s
    """The first position whose KV is computed."""
    ends: Int32s
    """The position behind the last one."""
    tokens: dict[int, Int32s]
    """By slot, the prompt of each row and the tokens that follow it."""


def read_rows(message: RecomputeRequests, state: RequestState) -> RecomputedRows:
    """Return the rows that a message names.

    Raises:
        InvalidStepError: they are not rows with a request, in the order of their slots, or have
            not so many computed tokens, or the tokens do not fit them, or the counts that it says
            of this rank's replica (read_replicas has checked the others).
    """
    limits, counts = state.limits, state.counts
    if message.max_num_tokens > limits.max_num_batched_tokens:
        fix = f"at most {limits.max_num_batched_tokens}, the scheduler's max_num_batched_tokens"
        raise _invalid("max_num_tokens", message.max_num_tokens, fix)
    if len(message.rows) % (4 * _COLUMNS) or len(message.token_ids) % 4:
        fix = "four int32 for each row, and an int32 for each token"
        raise _invalid("rows", f"{len(message.rows)} bytes", fix)
    rows = np.frombuffer(message.rows, "<i4").astype(np.int32).reshape(-1, _COLUMNS)
    slots, firsts, ends, num_given = rows.T
    is_row = (slots >= 0) & (slots < limits.max_num_seqs)
    if not is_row.all() or (np.diff(slots) <= 0).any() or not counts.live[slots].all():
        raise _invalid("rows", slots.tolist()[:8], "slots of requests, ascending")
    most = np.minimum(counts.num_computed[slots], state.num_prompt_tokens[slots] + num_given)
    wrong = (num_given < 0) | (firsts < 0) | (firsts >= ends) | (ends > most)
    if wrong.any():
        index = int(wrong.argmax())
        slot = int(slots[index])
        fix = f"positions of its {counts.num_computed[slot]} computed tokens that are given"
        raise _invalid(f"rows[{slot}]", rows[index].tolist(), fix)
    if state.replicas is not None:
        _check_own_counts(message, ends - firsts, state.replicas.dp_rank)
    given = np.frombuffer(message.token_ids, "<i4").astype(np.int32)
    if int(num_given.sum()) != given.size:
        raise _invalid("token_ids", given.size, f"the {int(num_given.sum())} tokens of the rows")
    if given.size and not 0 <= int(given.min()) <= int(given.max()) < limits.vocab_size:
        fix = f"tokens from 0 to {limits.vocab_size - 1}"
        raise _invalid("token_ids", [int(given.min()), int(given.max())], fix)
    by_row = np.split(given, np.cumsum(num_given)[:-1]) if slots.size else []
    tokens = {
        slot: np.concatenate((state.known_tokens[slot][: state.num_prompt_tokens[slot]], own))
        for slot, own in zip(slots.tolist(), by_row, strict=True)
    }
    return RecomputedRows(slots, firsts, ends, tokens)


class PassSpan(NamedTuple):
    """The tokens of a forward pass, counted through all rows one after the other."""

    first: int
    last: int
    """Behind its last token."""
    rows: slice
    """The rows that have some of them."""


def split_passes(counts: Int64s, most: int) -> Iterator[PassSpan]:
    """Yield passes over rows of as many tokens each, of `most` tokens each and the rest in the last
    one. A pass may begin and end within a row, and has no row twice.

    Rows may read what rows before them store in the same pass, but not where each has one token:
    backends then store and attend in one kernel. Only the end of a row that an earlier pass has
    begun can be in a block that others share, so it is then a pass of its own.
    """
    reached = np.cumsum(counts)
    begun = reached - counts
    total, first = int(counts.sum()), 0
    while first < total:
        last = min(first + most, total)
        part = slice(
            int(np.searchsorted(reached, first, side="right")),
            int(np.searchsorted(begun, last, side="left")),
        )
        if begun[part.start] < first and part.stop - part.start == last - first:
            last, part = first + 1, slice(part.start, part.start + 1)
        yield PassSpan(first, last, part)
        first = last


def plan_passes(seq: int, rows: RecomputedRows, most: int) -> Iterator[ScheduledStep]:
    """Yield the passes over the rows' tokens: see split_passes."""
    counts = (rows.ends - rows.firsts).astype(np.int64)
    begun = np.cumsum(counts) - counts
    for first, last, part in split_passes(counts, most):
        starts = rows.firsts[part] + np.maximum(first - begun[part], 0)
        ends = rows.firsts[part] + np.minimum(last - begun[part], counts[part])
        yield _pass(seq, rows.slots[part], starts.astype(np.int32), ends.astype(np.int32))


def read_replicas(message: RecomputeRequests, state: RequestState) -> list[TokensOfReplicas]:
    """Return the tokens of each replica in each pass of any, 0 in passes that a replica does not
    have. All ranks have the same counts, so all refuse wrong ones. Nothing of one replica alone.

    Raises:
        InvalidStepError: there are no counts of each replica's rows.
    """
    num_replicas = 0 if state.replicas is None else state.replicas.dp_size
    given = message.tokens_by_replica
    if len(given) != num_replicas or any(len(each) % 4 for each in given):
        fix = f"int32 [rows] of each of {num_replicas} replicas in lockstep"
        raise _invalid("tokens_by_replica", [len(each) for each in given], fix)
    counts = [np.frombuffer(each, "<i4").astype(np.int64) for each in given]
    rows, length = state.limits.max_num_seqs, state.limits.max_model_len
    if any(own.size > rows or (own < 1).any() or (own > length).any() for own in counts):
        fix = f"1 to {length} tokens of each of at most {rows} rows"
        raise _invalid("tokens_by_replica", [own.tolist()[:8] for own in counts], fix)
    most = message.max_num_tokens
    sizes = ([each.last - each.first for each in split_passes(own, most)] for own in counts)
    passes = zip_longest(*sizes, fillvalue=0)
    return [TokensOfReplicas(own, are_decodes=False) for own in passes]


def _pass(seq: int, slots: Int32s, starts: Int32s, ends: Int32s) -> ScheduledStep:
    return ScheduledStep(
        seq,
        slots.astype(np.int64),
        num_tokens=ends - starts,
        starts=starts,
        ends=ends,
        total_num_tokens=int((ends - starts).sum()),
        longest=int(ends.max()),
        num_samples=np.zeros_like(starts),
        new_requests=(),
        block_updates=NO_UPDATES,
        deferred=None,
        step_values=NO_STEP_VALUES,
        recomputes=True,
    )


def _check_own_counts(message: RecomputeRequests, counts: Int32s, dp_rank: int) -> None:
    given = np.frombuffer(message.tokens_by_replica[dp_rank], "<i4")
    if not np.array_equal(given, counts):
        fix = f"those of replica {dp_rank}'s own rows: {counts.tolist()[:8]}"
        raise _invalid("tokens_by_replica", given.tolist()[:8], fix)


def _invalid(field: str, value: object, fix: str) -> InvalidStepError:
    message = "the requests cannot be recomputed; nothing was"
    return InvalidStepError(message, field=field, value=value, fix=fix)

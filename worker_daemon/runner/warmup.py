"""Builds synthetic steps for the memory profile and the warm-up; they go through the normal entry.
Pure: runs nothing.

They are messages like a driver's; epoch, link and seq are those of the operation that runs them.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import TypeAlias

import msgspec
import numpy as np

from rpc_schema.codec import Frame
from rpc_schema.extensions import RequestExtension
from rpc_schema.operations import StepMessage
from rpc_schema.pooling import MAX_POOLED_BYTES, VALUE_BYTES, PoolingParams
from rpc_schema.step import ExecuteModel, NewRequestData
from worker_daemon.kernels.tiles import MIN_PIECE_KEYS
from worker_daemon.layers.prompt_attention import LONG_CONTEXT, MIN_TOKENS
from worker_daemon.runner.parts.registry import heaviest_of_step
from worker_daemon.runner.scheduled_step import StepLimits
from worker_daemon.runner.slot_bitmap import read_bitmap

StepLengths: TypeAlias = tuple[list[int], list[int]]
"""The sequences of a step: their context lengths, which include the step's tokens, and how many
tokens each has in the step."""


@dataclass(frozen=True, slots=True)
class SyntheticStep:
    """A step and its array frames."""

    message: ExecuteModel
    arrays: tuple[Frame, ...]


def largest_step(
    request: StepMessage, limits: StepLimits, heaviest: tuple[RequestExtension, ...] = ()
) -> SyntheticStep:
    """Return the step with the most tokens and the most samples, even with few blocks. heaviest:
    extensions of its requests."""
    num_seqs = limits.max_num_seqs
    budget = min(_most_tokens(limits), num_seqs * limits.max_model_len)
    lengths = [budget // num_seqs + (index < budget % num_seqs) for index in range(num_seqs)]
    extensions = heaviest if limits.generates else _lightest(limits)
    step = with_most_samples(prefill_step(request, limits, lengths, extensions), limits)
    return with_all_parts(step, limits)


def longest_step(request: StepMessage, limits: StepLimits) -> SyntheticStep:
    """Return the slowest step, and the one that gathers the most keys: as many tokens of one prompt
    as a step may have, after the longest possible context."""
    most = min(_most_tokens(limits), limits.max_model_len)
    length = limits.max_model_len if _may_begin_later(limits) else most
    return _admit(request, limits, [length], [most], _lightest(limits))


def warm_up_steps(
    request: StepMessage, limits: StepLimits, heaviest: tuple[RequestExtension, ...] = ()
) -> Iterator[SyntheticStep]:
    """Yield a prefill and a decode without parts; then a prefill with each part alone; then
    prefills and a decode with all parts, and prefills with several samples for each request and
    with drafts, if there may be any. `heaviest` has the extensions that switch parts on. Each part
    is run alone because its kernels depend on the logits' dtype, which other parts change.

    Each prefill frees the previous one's rows; the caller frees the last ones.
    """
    num_seqs, length = _warm_up_size(limits)
    has_decode = _has_decode(limits, length)

    def prefill(extensions: tuple[RequestExtension, ...]) -> SyntheticStep:
        return prefill_step(request, limits, [length] * num_seqs, extensions)

    least = _lightest(limits)
    yield prefill(least)
    if has_decode:
        yield _decode_step(request, num_seqs)
    if limits.generates:
        yield from (prefill((extension,)) for extension in heaviest)
        yield with_all_parts(prefill(least), limits)
        yield with_all_parts(prefill(heaviest), limits)
        if has_decode:
            yield with_all_parts(_decode_step(request, num_seqs), limits)
        if limits.most_samples_per_seq > 1:
            yield with_all_parts(with_most_samples(prefill(heaviest), limits), limits)
        if _may_have_drafts(limits):
            yield with_all_drafts(prefill(least), limits)


def _warm_up_size(limits: StepLimits) -> tuple[int, int]:
    """Return the number of requests in warm_up_steps, and the length of their prompts."""
    num_seqs = min(limits.max_num_seqs, 8, limits.num_blocks - 1)
    most = min(
        limits.block_size - 1, limits.max_model_len - 1, limits.max_num_batched_tokens // num_seqs
    )
    return num_seqs, max(1, most)


def _has_decode(limits: StepLimits, length: int) -> bool:
    """Return True if the prompts of warm_up_steps have room for a token more."""
    return limits.generates and length < min(limits.block_size, limits.max_model_len)


def warm_up_lengths(limits: StepLimits) -> Iterator[StepLengths]:
    """Yield the lengths of warm_up_steps."""
    num_seqs, length = _warm_up_size(limits)
    yield [length] * num_seqs, [length] * num_seqs
    if _has_decode(limits, length):
        yield [length + 1] * num_seqs, [1] * num_seqs


def with_all_parts(step: SyntheticStep, limits: StepLimits) -> SyntheticStep:
    """Return the step with an extension for every part that takes one per step. All its rows must
    sample; the step of a model that does not generate is returned unchanged."""
    if not limits.generates:
        return step
    slots = read_bitmap(step.message.scheduled)
    drafts = np.frombuffer(step.message.num_drafts, "<i4").reshape(-1, 2)
    slots = np.sort(np.append(slots, np.repeat(drafts[:, 0], drafts[:, 1])))
    extensions, frames = heaviest_of_step(slots, limits)
    message = msgspec.structs.replace(step.message, extensions=extensions)
    return SyntheticStep(message, (*step.arrays, *frames))


def with_most_samples(step: SyntheticStep, limits: StepLimits) -> SyntheticStep:
    """Return the step with as many samples as the limits allow, of one kind or the other."""
    if limits.max_drafts >= limits.max_samples_per_seq and _may_have_drafts(limits):
        return with_all_drafts(step, limits)
    return with_all_samples(step, limits)


def _may_have_drafts(limits: StepLimits) -> bool:
    return limits.generates and limits.max_drafts > 0 and not limits.keeps_state


def with_all_drafts(step: SyntheticStep, limits: StepLimits) -> SyntheticStep:
    """Return a step that admits requests with as many drafts of each as its tokens and the limits
    allow."""
    message, (tokens,) = step.message, step.arrays
    pairs = np.frombuffer(message.num_scheduled_tokens, "<i4").reshape(-1, 2).copy()
    pairs[:, 1] = np.minimum(pairs[:, 1] - 1, limits.max_drafts)
    drafts, total = pairs[pairs[:, 1] > 0], int(pairs[:, 1].sum())
    new = tuple(
        msgspec.structs.replace(
            request,
            num_tokens=request.num_tokens - count,
            num_prompt_tokens=request.num_tokens - count,
        )
        for request, count in zip(message.scheduled_new_reqs, pairs[:, 1].tolist(), strict=True)
    )
    message = msgspec.structs.replace(
        message,
        scheduled_new_reqs=new,
        num_drafts=drafts.tobytes(),
        draft_token_ids=np.zeros(total, "<i4").tobytes(),
    )
    return SyntheticStep(message, (tokens[: len(tokens) - 4 * total],))


def with_all_samples(step: SyntheticStep, limits: StepLimits) -> SyntheticStep:
    """Return the step with as many samples of each request as its tokens and the limits allow; the
    step of a model that does not generate is returned unchanged."""
    if not limits.generates or limits.max_samples_per_seq == 1:
        return step
    pairs = np.frombuffer(step.message.num_scheduled_tokens, "<i4").reshape(-1, 2).copy()
    pairs[:, 1] = np.minimum(pairs[:, 1], limits.max_samples_per_seq)
    message = msgspec.structs.replace(step.message, num_samples=pairs.tobytes())
    return SyntheticStep(message, step.arrays)


def size_sweep(request: StepMessage, limits: StepLimits) -> Iterator[SyntheticStep]:
    """Yield the steps of size_lengths. Every kernel variant that is chosen by size is used here
    once, so that no request's step has to compile it. Each frees the previous one's rows; the
    caller frees the last ones."""
    for lengths, counts in size_lengths(limits):
        yield _admit(request, limits, lengths, counts, _lightest(limits))


def decode_sweep(request: StepMessage, limits: StepLimits) -> Iterator[SyntheticStep]:
    """Yield the steps of decode_lengths, for daemons that capture no graphs: these choose kernels
    by the actual length. Each frees the previous one's rows; the caller frees the last ones."""
    for lengths, counts in decode_lengths(limits):
        yield _admit(request, limits, lengths, counts, _lightest(limits))


def size_lengths(limits: StepLimits) -> Iterator[StepLengths]:
    """Yield prefills of every order of magnitude, as one prompt and as many. The largest comes
    first, because the smaller ones can reuse its memory."""
    most_seqs, most_tokens = min(limits.max_num_seqs, limits.num_blocks - 1), _most_tokens(limits)
    is_cut = limits.max_model_len > MIN_PIECE_KEYS and _may_begin_later(limits)
    for total in reversed(_powers_up_to(most_tokens)):
        # As one prompt, as prompts just too short for a separate kernel, and as short ones.
        wanted = (1, -(-total // _SHARED_LENGTH), -(-total // 16), total)
        for num_seqs in sorted({min(most_seqs, count) for count in wanted}):
            tokens = min(total, num_seqs * limits.max_model_len)
            lengths = [tokens // num_seqs + (i < tokens % num_seqs) for i in range(num_seqs)]
            yield lengths, lengths
        if _SHARED_LENGTH < total < limits.max_model_len and _may_begin_later(limits):
            # As the end of a prompt, beside a decode if there is room: both have other kernels.
            lengths, counts = [min(2 * total, limits.max_model_len)], [total]
            if most_seqs > 1 and total > _SHARED_LENGTH + 1:
                lengths, counts = [2, *lengths], [1, total - 1]
            yield lengths, counts
        if 2 * total > min(_SHARED_LENGTH, most_tokens) and 1 < total <= _SHARED_LENGTH and is_cut:
            # As a short chunk of a long context, beside a decode if there is room: their keys are
            # cut.
            lengths, counts = [min(limits.max_model_len, MIN_PIECE_KEYS + total)], [total]
            if most_seqs > 1:
                lengths, counts = [2, *lengths], [1, total - 1]
            yield lengths, counts
            if most_tokens <= _SHARED_LENGTH and LONG_CONTEXT + total <= limits.max_model_len:
                yield [LONG_CONTEXT + total], [total]


def proposal_lengths(limits: StepLimits) -> Iterator[StepLengths]:
    """Yield the decodes of a draft model after the steps of size_lengths."""
    for lengths, _ in size_lengths(limits):
        yield [min(n + 1, limits.max_model_len) for n in lengths], [1] * len(lengths)


def decode_lengths(limits: StepLimits) -> Iterator[StepLengths]:
    """Yield decodes of every order of magnitude, by sequences and by context length."""
    if not _may_begin_later(limits):
        return
    for num_seqs in _ladder_up_to(min(limits.max_num_seqs, limits.max_num_batched_tokens)):
        for length in _powers_up_to(min(limits.max_model_len, _MAX_SWEPT_KEYS // num_seqs)):
            yield [length] * num_seqs, [1] * num_seqs


_MAX_SWEPT_KEYS = 1 << 22
"""Above this product of sequences and length, a launch fills any device, however the work is
split."""

_SHARED_LENGTH = MIN_TOKENS - 1
"""Longer prompts may be computed one by one (layers/prompt_attention.py)."""


def prefill_step(
    request: StepMessage,
    limits: StepLimits,
    lengths: list[int],
    extensions: tuple[RequestExtension, ...] = (),
) -> SyntheticStep:
    """Return a step that admits one request per length and computes all of its tokens."""
    return _admit(request, limits, lengths, lengths, extensions)


def _admit(
    request: StepMessage,
    limits: StepLimits,
    lengths: list[int],
    num_scheduled: list[int],
    extensions: tuple[RequestExtension, ...] = (),
) -> SyntheticStep:
    """Return a step that admits one request per length and computes its last num_scheduled tokens,
    as if the others were cached. Requests may share blocks, because nothing reads the output."""
    slots = np.arange(len(lengths))
    needed = [[-(-n // group.block_size) for n in lengths] for group in limits.block_groups]
    block_slots = np.concatenate([np.repeat(slots, own) for own in needed])
    block_groups = np.repeat(np.arange(len(needed)), [sum(own) for own in needed])
    block_ids = 1 + np.arange(block_slots.size) % (limits.num_blocks - 1)
    message = ExecuteModel(
        epoch=request.epoch,
        link=request.link,
        seq=request.seq,
        total_num_scheduled_tokens=sum(num_scheduled),
        scheduled=_bitmap(len(lengths)),
        num_scheduled_tokens=np.stack([slots, num_scheduled], axis=1).astype("<i4").tobytes(),
        new_block_slots=block_slots.astype("<u2").tobytes(),
        new_block_ids=block_ids.astype("<i4").tobytes(),
        new_block_groups=block_groups.astype("u1").tobytes() if len(needed) > 1 else b"",
        resync=b"",
        scheduled_new_reqs=tuple(
            NewRequestData(
                slot=slot,
                req_id=f"synthetic-{slot}",
                num_tokens=length,
                num_prompt_tokens=length,
                num_computed_tokens=length - count,
                extensions=extensions,
            )
            for slot, (length, count) in enumerate(zip(lengths, num_scheduled, strict=True))
        ),
    )
    return SyntheticStep(message, (np.zeros(sum(lengths), "<i4").tobytes(),))


def _lightest(limits: StepLimits) -> tuple[RequestExtension, ...]:
    """Return the extensions that every request needs: PoolingParams if the model does not
    generate."""
    return () if limits.generates else (PoolingParams(task=limits.pooling.tasks[0].task),)


def _most_tokens(limits: StepLimits) -> int:
    """Return the tokens of the largest step, whose outputs must fit into its reply."""
    most = limits.max_num_batched_tokens
    if limits.generates or limits.pooling.tasks[0].states != "each":
        return most
    return min(most, MAX_POOLED_BYTES // VALUE_BYTES // limits.pooling.tasks[0].width)


def _may_begin_later(limits: StepLimits) -> bool:
    """Return True if the tokens of a request may have been computed in part."""
    return limits.generates or limits.pooling.tasks[0].states == "last"


def _powers_up_to(largest: int) -> list[int]:
    """Return the powers of two below `largest`, then `largest`."""
    return [*(1 << power for power in range((largest - 1).bit_length())), largest]


def _ladder_up_to(largest: int) -> list[int]:
    """Return the powers of two below `largest`, the numbers half-way between them, and `largest`.
    So for each number n, one of them lies between n and 1.5 n, unless `largest` is smaller."""
    rungs = {size for power in _powers_up_to(largest) for size in (power, power + power // 2)}
    return sorted(size for size in rungs if size <= largest)


def _decode_step(request: StepMessage, num_seqs: int) -> SyntheticStep:
    message = ExecuteModel(
        epoch=request.epoch,
        link=request.link,
        seq=request.seq,
        total_num_scheduled_tokens=num_seqs,
        scheduled=_bitmap(num_seqs),
    )
    return SyntheticStep(message, ())


def _bitmap(num_seqs: int) -> bytes:
    return np.packbits(np.ones(num_seqs, np.bool_), bitorder="little").tobytes()

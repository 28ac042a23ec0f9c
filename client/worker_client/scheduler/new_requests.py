"""The start of a request: here, or by adoption from another driver. Checks it against the limits of
the group, and notes what they mean for its steps."""

import math
from array import array
from collections.abc import Callable, Sequence
from functools import partial
from typing import TYPE_CHECKING

import msgspec
import numpy as np

from rpc_schema.extensions import extension_of
from rpc_schema.kv_cache import NUM_NULL_BLOCKS, BlockGroup
from rpc_schema.pooling import PoolingParams, pooled_bytes
from rpc_schema.routed_experts import ReplayExperts
from rpc_schema.sampling import MAX_PROMPT_LOGPROBS_TOKENS, StopTokens, TraceWanted
from worker_client.errors import RequestError
from worker_client.group.adoption import AdoptedRequest
from worker_client.inputs.request_checks import check_fits, feature_error
from worker_client.inputs.stop_strings import StopWatch
from worker_client.parts.registry import Extensions
from worker_client.requests import GenerationRequest, PromptTokenIds, RequestOutput, seeded
from worker_client.scheduler.admissions import AdmissionNote, most_admission_bytes, note_of
from worker_client.scheduler.interface import SchedulerLimits
from worker_client.scheduler.request import (
    ONLY_SAMPLE,
    Request,
    SampleIdentity,
    WatchedRequest,
)
from worker_client.scheduler.weights_history import WeightsHistory
from worker_client.steps.step_checks import (
    MAX_ADMITTED_BYTES,
    MAX_ADMITTED_TOKENS,
    WIRE_LIMITS,
    GroupLimits,
    extension_fault,
    pooling_admission_fault,
)

if TYPE_CHECKING:  # it needs the library of an extra
    from worker_client.inputs.tokenizer import Tokenizer


def _request_class(
    sample: SampleIdentity, extensions: Extensions, texts: "Tokenizer | None"
) -> Callable[..., Request]:
    """Return the class that a request's stop strings need, with their watch.

    Raises:
        RequestError: it has stop strings, and there is no tokenizer.
    """
    if not sample.stop:
        return Request
    if texts is None:
        raise RequestError(
            "stop strings need the model's tokenizer",
            field="sampling.stop",
            value=sample.stop[0],
            fix="give the Scheduler a tokenizer, or use stop_token_ids",
        )
    stops = extension_of(extensions, StopTokens)
    watch = StopWatch(
        sample.stop,
        texts.stream(),
        min_tokens=0 if stops is None else stops.min_tokens,
        includes_stop=sample.includes_stop,
    )
    return partial(WatchedRequest, watch=watch)


def new_request(
    request: GenerationRequest, limits: SchedulerLimits, texts: "Tokenizer | None" = None
) -> Request:
    """Return a request in its initial state, with a seed if it needs one. texts: the tokenizer
    whose text is searched for stop strings.

    Raises:
        RequestError: a field has the wrong type or is out of bounds, or it can never be served.
    """
    request = check_fits(request, max_model_len=limits.max_model_len, vocab_size=limits.vocab_size)
    request = seeded(request)
    sampling = request.sampling
    if sampling.n != 1:
        raise RequestError(
            "a request of several samples",
            field="sampling.n",
            value=sampling.n,
            fix="add each of worker_client.requests.forked(request), as Driver does",
        )
    num_prompt = len(request.prompt)
    limit = min(num_prompt + request.max_tokens, limits.max_model_len)
    if request.pooling is not None:
        limit = num_prompt
    samples = request.pooling is None
    if limit - samples > limits.longest_request:
        usable = limits.num_blocks - NUM_NULL_BLOCKS
        raise RequestError(
            f"{limit} tokens do not fit into {usable} blocks of {limits.block_size}",
            field="max_tokens" if samples else "prompt",
            value=request.max_tokens if samples else num_prompt,
            fix="ask for less" if samples else "use a shorter prompt",
        )
    most_tokens = limits.max_num_batched_tokens
    if sampling.prompt_logprobs is not None and most_tokens > MAX_PROMPT_LOGPROBS_TOKENS:
        raise RequestError(
            f"a step may have {most_tokens} tokens, too many for log probabilities of prompts",
            field="sampling.prompt_logprobs",
            value=sampling.prompt_logprobs,
            fix=f"load with max_num_batched_tokens of at most {MAX_PROMPT_LOGPROBS_TOKENS}",
        )
    extensions = request.extensions(limits.end_ids)
    fault = None
    if extensions and (request.features or not _only_stops(extensions)):
        fault = extension_fault(extensions, limits.bounds, num_prompt)
    if fault is None and not (samples and limits.generates):
        fault = pooling_admission_fault(extensions, num_prompt, 0, group_bounds(limits))
    if fault is not None:
        raise feature_error(fault)
    sample = ONLY_SAMPLE
    if sampling.stop or request.index is not None:
        includes_stop = sampling.include_stop_str_in_output
        sample = SampleIdentity(request.index, sampling.stop, includes_stop)

    def make(extensions: Extensions) -> Request:
        return _request_class(sample, extensions, texts)(
            id=request.id,
            tokens=_int32s(request.prompt),
            num_prompt_tokens=num_prompt,
            limit=limit,
            extensions=extensions,
            priority=request.priority,
            deadline=math.inf if request.deadline is None else request.deadline,
            sample=sample,
        )

    made = make(extensions)
    if request.output_token_ids:
        made = _with_output(made, request.output_token_ids, make)
    if request.continues is not None:
        _go_on_behind(made, request.continues)
    _check_replay(made)
    _note_limits(made, limits)
    _check_admission(made, limits.block_groups)
    return made


def _check_replay(made: Request) -> None:
    """Refuse experts of a token that is not computed: the last one, behind which nothing is
    generated."""
    replay = extension_of(made.extensions, ReplayExperts)
    if replay is not None and replay.num_positions > len(made.tokens):
        raise RequestError(
            "no step computes the last token, behind which nothing is generated",
            field="replay_experts",
            value=replay.num_positions,
            fix=f"give the experts of at most {len(made.tokens)} tokens",
        )


def _with_output(
    made: Request, output: Sequence[int], make: Callable[[Extensions], Request]
) -> Request:
    """Return a request with the tokens that it brings. make: makes it again without, with other
    extensions.

    Raises:
        RequestError: one of them ends the request, and it is not the last; or the last one does,
            and nothing is reported.
    """
    reason = made.bring(output)
    if reason is None:
        return made
    count = len(made.tokens) - made.num_prompt_tokens
    if count < len(output):
        raise RequestError(
            f"output_token_ids goes on past a token that ends the request ({reason!r})",
            field="output_token_ids",
            value=f"{len(output)} tokens",
            fix=f"give the first {count}, or change what ends it (ignore_eos, stop)",
        )
    if made.reported is None or not made.reported.num_brought:
        raise RequestError(
            "output_token_ids leaves nothing to generate, and nothing is reported",
            field="output_token_ids",
            value=f"{count} tokens, then {reason!r}",
            fix="ask for full_logprobs, or give fewer tokens or a larger max_tokens",
        )
    wanted = TraceWanted(num_tokens=count - 1, last_token_id=output[-1])
    kept = (each for each in made.extensions if not isinstance(each, TraceWanted))
    made = make((*kept, wanted))
    made.bring(output[:-1])
    return made


def _go_on_behind(made: Request, former: RequestOutput) -> None:
    """Continue a request in the state that it had under another driver, as after a preemption.

    Raises:
        RequestError: one of its tokens ends it, or it does not begin with those that it brings.
    """
    num_had = len(made.tokens) - made.num_prompt_tokens
    brought = made.tokens[made.num_prompt_tokens :].tolist()
    added = former.token_ids[num_had:]
    if former.token_ids[:num_had] != brought or any(made.take(token) for token in added):
        raise RequestError(
            "the request does not go on behind these tokens: one ends it, or they are of another",
            field="continues",
            value=f"{len(former.token_ids)} tokens",
            fix="give the output of this request, before its end",
        )
    made.num_tokens = len(made.tokens)
    made.weights.runs = former.weights_versions
    made.blocks.num_cached_tokens = former.num_cached_tokens
    made.blocks.num_loaded_tokens = former.num_loaded_tokens
    made.blocks.num_preemptions = former.num_preemptions + 1
    made.drafts.num_drafted, made.drafts.num_accepted = former.num_drafted, former.num_accepted
    if made.reported is not None:
        made.reported.go_on_behind(former)
    if made.experts is not None and former.routed_experts is not None:
        made.experts.begin_with(former.routed_experts, former.num_recomputed_experts)
    made.arrival = 0  # before all that have not run


def _only_stops(extensions: Extensions) -> bool:
    """Return True if there is no more than the stop tokens, whose ids were checked."""
    return len(extensions) == 1 and type(extensions[0]) is StopTokens


def _int32s(token_ids: PromptTokenIds) -> "array[int]":
    return array("i", np.asarray(token_ids, np.int32).tobytes())


def group_bounds(limits: SchedulerLimits) -> GroupLimits:
    """Return the bounds of a group on one request, as the checks of steps take them."""
    return GroupLimits(
        max_num_batched_tokens=limits.max_num_batched_tokens,
        vocab_size=WIRE_LIMITS.vocab_size if limits.vocab_size is None else limits.vocab_size,
        hidden_size=limits.hidden_size,
        max_loras=limits.max_loras,
        generates=limits.generates,
        pooling=limits.pooling,
        max_samples_per_seq=limits.max_samples_per_seq,
    )


def _note_limits(made: Request, limits: SchedulerLimits) -> None:
    """Note what a group's limits mean for a request's steps."""
    if not limits.makes_drafts and made.traits.may_draft:
        made.traits = msgspec.structs.replace(made.traits, may_draft=False)
        made.sees_each = True
    if made.experts is not None:
        made.experts.max_cached = limits.max_cached_experts
    if made.pools:
        _note_pooling(made, limits)


def _note_pooling(made: Request, limits: SchedulerLimits) -> None:
    """Note what a request's pooling means for its steps."""
    params = extension_of(made.extensions, PoolingParams)
    support = limits.pooling
    found = None if params is None or support is None else support.find(params.task)
    if params is None or support is None or found is None:
        return
    output_bytes = pooled_bytes(params, len(made.tokens), support)
    made.traits = msgspec.structs.replace(made.traits, output_bytes=output_bytes)
    if found.states != "last" or support.whole_prompts:
        made.prefix.may_share = False  # its output needs the hidden states of all tokens


def _check_admission(made: Request, groups: Sequence[BlockGroup]) -> None:
    """Check that one step can admit the request with all tokens that it may ever have, as after a
    preemption."""
    num_tokens = made.most_computed
    num_runs = max(0, num_tokens - made.num_prompt_tokens)  # as many as tokens, at worst
    num_bytes = most_admission_bytes(made, num_tokens, groups, num_runs)
    if num_tokens <= MAX_ADMITTED_TOKENS and num_bytes <= MAX_ADMITTED_BYTES:
        return
    most = min(MAX_ADMITTED_TOKENS, MAX_ADMITTED_BYTES * num_tokens // num_bytes)
    too_long = made.num_prompt_tokens > most
    raise RequestError(
        f"{made.limit} tokens are more than a step can admit",
        field="prompt" if too_long else "max_tokens",
        value=made.num_prompt_tokens if too_long else made.limit - made.num_prompt_tokens,
        fix=f"use at most {most} tokens, prompt and output together",
    )


def adopted_request(
    request: AdoptedRequest, limits: SchedulerLimits, texts: "Tokenizer | None" = None
) -> Request:
    """Return a request of another driver in the state from which it continues here, not running
    yet. texts: as new_request takes it.

    Raises:
        RequestError: it was admitted by another kind of scheduler, or does not fit these limits.
    """
    note = note_of(request)
    if note.limit - 1 > min(limits.longest_request, limits.max_model_len - 1):
        raise RequestError(
            f"request {request.req_id!r} may have {note.limit} tokens, which is more than fits",
            field="limit",
            value=note.limit,
            fix="use the limits that it was admitted under",
        )
    sample = SampleIdentity(note.index, note.stop, note.includes_stop)
    made = _request_class(sample, request.extensions, texts)(
        id=request.req_id,
        tokens=_int32s(request.token_ids),
        num_prompt_tokens=request.num_prompt_tokens,
        limit=note.limit,
        extensions=request.extensions,
        arrival=note.arrival,
        priority=note.priority,
        deadline=note.deadline,
        sample=sample,
        weights=WeightsHistory(
            note.weights_versions, note.adapter_version, _recomputed_by_others(request, note)
        ),
    )
    made.blocks.num_cached_tokens = note.num_cached_tokens
    made.blocks.num_preemptions = note.num_preemptions
    made.prefix.is_mixed = note.is_mixed or bool(request.earlier_versions)
    _note_limits(made, limits)
    _check_admission(made, limits.block_groups)
    return made


def _recomputed_by_others(request: AdoptedRequest, note: AdmissionNote) -> int:
    """Return WeightsHistory.num_recomputed of an adopted request that goes on with the KV that it
    has. The ranks may lack that of its newest tokens, which have been computed once."""
    last = len(request.token_ids) - 1
    if last < request.num_prompt_tokens:
        return 0
    kept = max(note.num_recomputed, request.num_recomputed_tokens)
    return kept if request.num_computed_tokens == last else last

"""vLLM's SchedulerOutput as steps of ours, usually one."""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from itertools import compress
from typing import Any, Final

import numpy as np

from rpc_schema.extensions import RequestExtension
from rpc_schema.pooling import MAX_POOLED_BYTES
from rpc_schema.sampling import PromptLogprobsWanted
from worker_client.scheduler_output import NewRequest, SchedulerOutput, StepValues
from worker_client.steps.masks import StepMasks
from worker_client.steps.step_checks import MAX_ADMITTED_TOKENS
from worker_client.vllm.batches import RequestBatch, RequestBatches
from worker_client.vllm.embedded_prompts import with_placeholders
from worker_client.vllm.requests import KnownRequest, Requests, wire_id

ADMITTED_AT_ONCE: Final = MAX_ADMITTED_TOKENS // 2
"""Tokens of new requests above which a step is preceded by one that only admits: half of the bound,
since blocks and extensions count too."""

AdapterOf = Callable[[int], RequestExtension]
"""Returns the extension of an adapter's requests, by its id."""


class _LastBlocks:
    """The last blocks of a request in one KV group."""

    __slots__ = ("_ids", "_most", "_num")

    def __init__(self, block_ids: Sequence[int], most: int) -> None:
        """most: how many are kept."""
        self._ids = list(block_ids[-most:])
        self._most = most
        self._num = len(block_ids)

    def append(self, block_ids: Sequence[int]) -> None:
        """Add blocks at the end."""
        self._ids = [*self._ids, *block_ids][-self._most :]
        self._num += len(block_ids)

    def find(self, index: int) -> Iterator[int]:
        """Yield the block at an index of all blocks, if it is there and kept."""
        place = index - (self._num - len(self._ids))
        if 0 <= place < len(self._ids):
            yield self._ids[place]


class StepWriter:
    """Translates the steps of one scheduler, in order."""

    def __init__(
        self,
        requests: Requests,
        adapter_of: AdapterOf,
        has_row: Callable[[str], bool],
        block_sizes: Sequence[int],
        most_beyond: int = 0,
    ) -> None:
        """has_row: whether the workers have a request, by its id on the wire. block_sizes: of each
        KV group. most_beyond: tokens of a request for which it has blocks beyond those of its step:
        drafts in its steps in flight, which may be refused, and room for the drafts' model."""
        self._requests = requests
        self._adapter_of = adapter_of
        self._has_row = has_row
        self._block_sizes = tuple(block_sizes)
        self._num_kept = [2 + -(-most_beyond // size) for size in block_sizes]
        self._unsent: dict[str, None] = {}
        """Requests that have ended, but in no step that was sent; a dict keeps their order."""
        self._batches = RequestBatches()
        self.batch = RequestBatch(())
        """All requests of the last step."""
        self._last_blocks: dict[str, list[_LastBlocks]] = {}
        """For each request with a row, its last blocks in each KV group."""

    def end(self, wire_ids: Iterable[str]) -> None:
        """End requests with the next step, by their ids on the wire."""
        ended = dict.fromkeys(wire_ids)
        self._unsent.update(ended)
        for req_id in ended:
            self._last_blocks.pop(req_id, None)

    def end_of(self, output: Any) -> None:
        """End the requests that a vLLM step ends, with the next step: this one has no tokens, and
        is not sent."""
        self.end(map(wire_id, sorted(output.finished_req_ids)))
        self.end(map(wire_id, sorted(output.preempted_req_ids or ())))
        self._requests.forget(output.finished_req_ids)

    def take_ended(self) -> SchedulerOutput | None:
        """Return a step that ends what is still to be ended; None: nothing is."""
        if not self._unsent:
            return None
        return SchedulerOutput(finished_req_ids=self._take_unsent())

    def write(self, output: Any) -> list[SchedulerOutput]:
        """Translate a step with tokens. Steps before the last sample nothing, except where a
        request may not share its step (see _apart)."""
        if _only_goes_on(output) and not self._unsent:
            self.batch = self._batches.find(output.num_scheduled_tokens)
            step = SchedulerOutput(decode_req_ids=self.batch.wire_ids)
            self._add_blocks(step, output.scheduled_cached_reqs)
            self._note_last_blocks((), step)
            return [step]
        return self._write_changed(output)

    def _write_changed(self, output: Any) -> list[SchedulerOutput]:
        self._requests.forget(output.finished_req_ids)
        new = [self._admission(each) for each in output.scheduled_new_reqs]
        self.end(map(wire_id, sorted(output.finished_req_ids)))
        self.end(each.req_id for each in new if self._has_row(each.req_id))
        finished = self._take_unsent()
        preempted = [r for r in map(wire_id, output.preempted_req_ids or ()) if r not in finished]
        deferred = self._deferred(output)
        counts, drafts = _drafts_of(output)
        decodes = self._find_decodes(output, counts)
        step = SchedulerOutput(
            decode_req_ids=decodes.wire_ids,
            scheduled_new_reqs=new,
            finished_req_ids=finished,
            preempted_req_ids=preempted,
            extensions=_deferring(deferred),
            num_drafts=drafts,
            skip_drafts=output.skip_drafts,
        )
        self._add_counts(step, counts, decodes)
        self._add_blocks(step, output.scheduled_cached_reqs)
        apart = self._apart(step, output.scheduled_cached_reqs)
        self._note_last_blocks(new, step)
        return [part for each in apart for part in self._admitted_first(each)]

    def _take_unsent(self) -> list[str]:
        unsent, self._unsent = list(self._unsent), {}
        return unsent

    def _admission(self, data: Any) -> NewRequest:
        known = self._requests[data.req_id]
        if data.prompt_embeds is None:
            num_prompt_tokens = len(data.prompt_token_ids)
            tokens = np.array(data.prefill_token_ids or data.prompt_token_ids, np.int32)
        else:
            num_prompt_tokens, tokens = len(data.prompt_embeds), with_placeholders(data)
        first, *more = data.block_ids
        extensions = self._extensions(known, has_output=len(tokens) > num_prompt_tokens)
        if data.prompt_embeds is not None:
            extensions += (self._requests.embeds_extension(data.req_id),)
        return NewRequest(
            known.wire_id,
            tokens,
            num_prompt_tokens,
            data.num_computed_tokens,
            first,
            extensions,
            more_block_ids=tuple(more),
        )

    def _extensions(self, known: KnownRequest, *, has_output: bool) -> tuple[RequestExtension, ...]:
        """Return a request's extensions. Where it has output, the scheduler has its prompt's log
        probabilities too."""
        own = known.extensions
        if has_output and known.prompt_logprobs is not None:
            own = tuple(each for each in own if not isinstance(each, PromptLogprobsWanted))
        return (*own, self._adapter_of(known.lora_id)) if known.lora_id else own

    def _find_decodes(self, output: Any, counts: Mapping[str, int]) -> RequestBatch:
        self.batch = self._batches.find(counts)
        if sum(counts.values()) == len(counts) and not output.scheduled_new_reqs:
            return self.batch
        new = {each.req_id for each in output.scheduled_new_reqs}
        return self._batches.find(r for r, n in counts.items() if n == 1 and r not in new)

    def _deferred(self, output: Any) -> Sequence[str]:
        """Return the requests with a grammar: their masks come after the step."""
        if not output.has_structured_output_requests:
            return ()
        known = (self._requests[req_id] for req_id in output.num_scheduled_tokens)
        return [
            each.wire_id
            for each in known
            if getattr(each.params, "structured_outputs", None) is not None
        ]

    def _add_counts(
        self, step: SchedulerOutput, counts: Mapping[str, int], decodes: RequestBatch
    ) -> None:
        if decodes is self.batch:
            return
        step.num_scheduled_tokens = {
            wire_id(req_id): count
            for req_id, count in counts.items()
            if req_id not in decodes.row_of
        }

    def _add_blocks(self, step: SchedulerOutput, cached: Any) -> None:
        if not any(cached.new_block_ids):  # None for most
            return
        by_group: tuple[dict[str, Sequence[int]], ...] = tuple({} for _ in self._block_sizes)
        pairs = zip(cached.req_ids, cached.new_block_ids, strict=True)
        for req_id, blocks in compress(pairs, cached.new_block_ids):  # None for most
            for group, own in enumerate(blocks):
                if own:
                    by_group[group][wire_id(req_id)] = own
        step.new_block_ids, step.more_new_block_ids = by_group[0], by_group[1:]

    def _admitted_first(self, step: SchedulerOutput) -> list[SchedulerOutput]:
        """Take new requests out of a step that would not fit into a message; return the steps that
        admit them, without tokens, and then the step."""
        earlier: list[SchedulerOutput] = []
        while sum(len(each.token_ids) for each in step.scheduled_new_reqs) > ADMITTED_AT_ONCE:
            some, left = _first_that_fit(step.scheduled_new_reqs)
            if not left and not earlier:
                break  # a single one
            earlier.append(SchedulerOutput(scheduled_new_reqs=some))
            step.scheduled_new_reqs = left
        if earlier:
            earlier[0].finished_req_ids, step.finished_req_ids = step.finished_req_ids, ()
            earlier[0].preempted_req_ids, step.preempted_req_ids = step.preempted_req_ids, ()
        return [*earlier, step]

    def _apart(self, step: SchedulerOutput, cached: Any) -> list[SchedulerOutput]:
        """Put new requests that begin with a block which this step fills into steps after it. vLLM
        counts a block as cached once the step that fills it is planned; docs/scheduler-rules.md
        allows it from the next step on (rule 4)."""
        new = step.scheduled_new_reqs
        if not any(each.num_computed_tokens for each in new):
            return [step]
        first, *later = self._levels(step, cached)
        if not later:
            return [step]
        counts, deferred = step.num_scheduled_tokens, step.deferred_req_ids
        steps = [
            SchedulerOutput(
                num_scheduled_tokens={each.req_id: counts[each.req_id] for each in some},
                scheduled_new_reqs=some,
                extensions=_deferring([r.req_id for r in some if r.req_id in deferred]),
            )
            for some in later
        ]
        moved = {each.req_id for some in later for each in some}
        step.scheduled_new_reqs = first
        step.num_scheduled_tokens = {r: n for r, n in counts.items() if r not in moved}
        step.extensions = _deferring([r for r in deferred if r not in moved])
        return [step, *steps]

    def _levels(self, step: SchedulerOutput, cached: Any) -> list[list[NewRequest]]:
        """Return the new requests in as many parts as they need, so that none begins with a block
        that a request of the same part fills. The first part, which goes with the requests that run
        already, may be empty."""
        levels: list[list[NewRequest]] = [[]]
        level_of = dict.fromkeys(self._filled(step, cached), 0)
        new = {each.req_id: each for each in step.scheduled_new_reqs}
        # In the order in which vLLM found blocks for them.
        for each in (new[req_id] for req_id in step.num_scheduled_tokens if req_id in new):
            read: list[int] = []
            written: list[int] = []
            for blocks, size in zip(each.blocks_by_group, self._block_sizes, strict=True):
                num_full = each.num_computed_tokens // size
                read += blocks[:num_full]
                written += blocks[num_full:]
            level = max((level_of[block] + 1 for block in read if block in level_of), default=0)
            level_of.update(dict.fromkeys(written, level))
            levels += [[] for _ in range(level + 1 - len(levels))]
            levels[level].append(each)
        return levels

    def _filled(self, step: SchedulerOutput, cached: Any) -> Iterator[int]:
        """Yield the blocks that running requests fill with a step: those that they get with it, and
        those that have room left for it. Where tokens may still be refused, vLLM shares no block
        that this step fills."""
        for given in (step.new_block_ids, *step.more_new_block_ids):
            for own in given.values():
                yield from own
        for req_id, num_computed in zip(cached.req_ids, cached.num_computed_tokens, strict=True):
            name = wire_id(req_id)
            count = step.num_scheduled_tokens.get(name, 1)
            for size, last in zip(self._block_sizes, self._last_blocks.get(name, ()), strict=False):
                if num_computed % size + count >= size:
                    yield from last.find(num_computed // size)

    def _note_last_blocks(self, new: Iterable[NewRequest], step: SchedulerOutput) -> None:
        for each in new:
            self._last_blocks[each.req_id] = [
                _LastBlocks(own, most)
                for own, most in zip(each.blocks_by_group, self._num_kept, strict=True)
            ]
        for group, given in enumerate((step.new_block_ids, *step.more_new_block_ids)):
            for req_id, own in given.items():
                if req_id in self._last_blocks:  # the table of slots refuses others
                    self._last_blocks[req_id][group].append(own)


def _drafts_of(output: Any) -> tuple[Mapping[str, int], dict[str, int]]:
    """Return the tokens of each request by vLLM's ids, and how many are drafts by the wire's. New
    requests lose their drafts, since the devices have none for them. vLLM takes these as refused;
    until then, its counts of the request are higher than the workers', all by the same number."""
    counts, drafts = output.num_scheduled_tokens, output.scheduled_spec_decode_tokens
    if not drafts:
        return counts, {}
    kept = {wire_id(req_id): len(own) for req_id, own in drafts.items()}
    new = [each.req_id for each in output.scheduled_new_reqs if each.req_id in drafts]
    if new:
        counts = {**counts, **{r: counts[r] - kept.pop(wire_id(r)) for r in new}}
    return counts, kept


def _only_goes_on(output: Any) -> bool:
    """Return whether a step of vLLM's only decodes, a token of each request, without masks."""
    return not (
        output.total_num_scheduled_tokens != len(output.num_scheduled_tokens)
        or output.scheduled_new_reqs
        or output.finished_req_ids
        or output.preempted_req_ids
        or output.has_structured_output_requests
    )


def split_by_outputs(step: SchedulerOutput, requests: Requests) -> list[SchedulerOutput]:
    """Split a step of requests that pool, so that each part's reply can hold the outputs: rows that
    go on before new ones, as vLLM has found blocks for them. Usually one part."""
    new = {each.req_id: each for each in step.scheduled_new_reqs}
    rows = sorted((*step.decode_req_ids, *step.num_scheduled_tokens), key=new.__contains__)
    parts: list[list[str]] = [[]]
    num_bytes = 0
    for req_id in rows:
        known = requests.find(req_id)
        own = 0 if known is None else known.output_bytes
        if parts[-1] and num_bytes + own > MAX_POOLED_BYTES:
            parts.append([])
            num_bytes = 0
        parts[-1].append(req_id)
        num_bytes += own
    if len(parts) == 1:
        return [step]
    steps = [_rows_of(step, new, part) for part in parts]
    steps[0].finished_req_ids = step.finished_req_ids
    steps[0].preempted_req_ids = step.preempted_req_ids
    return steps


def _rows_of(
    step: SchedulerOutput, new: Mapping[str, NewRequest], rows: Sequence[str]
) -> SchedulerOutput:
    """Return a step with some rows of another one."""
    own = set(rows)
    blocks, *more = (
        {r: given for r, given in group.items() if r in own}
        for group in (step.new_block_ids, *step.more_new_block_ids)
    )
    counts = step.num_scheduled_tokens
    return SchedulerOutput(
        num_scheduled_tokens={r: counts[r] for r in rows if r in counts},
        decode_req_ids=tuple(r for r in step.decode_req_ids if r in own),
        scheduled_new_reqs=[new[r] for r in rows if r in new],
        new_block_ids=blocks,
        more_new_block_ids=more,
    )


def _first_that_fit(
    requests: Sequence[NewRequest],
) -> tuple[Sequence[NewRequest], Sequence[NewRequest]]:
    """Split requests after the last that fits into a message with those before it."""
    num_tokens = 0
    for index, each in enumerate(requests):
        num_tokens += len(each.token_ids)
        if index and num_tokens > ADMITTED_AT_ONCE:
            return requests[:index], requests[index:]
    return requests, ()


def _deferring(req_ids: Sequence[str]) -> tuple[StepValues, ...]:
    """Return the extension of a step whose requests with a grammar are sampled later."""
    return (StepMasks(deferred=req_ids),) if req_ids else ()

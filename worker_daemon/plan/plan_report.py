"""Prints a memory plan, as text and as JSON."""

import json
from collections.abc import Iterator, Sequence
from typing import Final

import msgspec

from worker_daemon.plan.planning import GroupPlan, RankPlan
from worker_daemon.plan.step_memory import MARGIN_DIVISOR

NOT_COUNTED: Final = (
    "the CUDA context",
    "NCCL's buffers",
    "CUDA graphs",
    "memory that libraries and the allocator keep besides tensors",
    "memory of other processes",
)
_HEADINGS: Final = (
    ("rank",),
    ("stage",),
    ("tensor", "rank"),
    ("layers",),
    ("weights", "bytes"),
    ("LoRA adapters", "bytes"),
    ("rotary table", "bytes"),
    ("largest step", "bytes, about"),
    ("left for KV", "bytes"),
    ("a block", "bytes"),
    ("blocks",),
    ("tokens",),
    ("longest requests", "at once"),
)


def plan_json(plan: GroupPlan) -> str:
    """Return the plan as one line of JSON: its fields, and not_counted."""
    return json.dumps({**msgspec.to_builtins(plan), "not_counted": NOT_COUNTED})


def plan_text(plan: GroupPlan) -> str:
    """Return the plan as lines for a terminal, each ending in a newline."""
    return "".join(f"{line}\n" for line in _lines(plan))


def _format(plan: GroupPlan) -> str:
    if plan.quantization is None:
        return plan.dtype
    return f"{plan.dtype} with matrices in {'4 bits' if plan.quantization == 'int4' else 'FP8'}"


def _lines(plan: GroupPlan) -> Iterator[str]:
    ranks, length = plan.ranks, plan.max_model_len
    pp_size, tp_size = ranks[-1].pp_rank + 1, ranks[-1].tp_rank + 1
    yield (
        f"{plan.architecture}, {_format(plan)}: {_count(pp_size, 'pipeline stage')} x "
        f"{_count(tp_size, 'tensor rank')}; max_model_len {length:,}, max_num_seqs "
        f"{plan.max_num_seqs:,}, max_num_batched_tokens {plan.max_num_batched_tokens:,}"
    )
    yield (
        f"a device has {plan.memory_bytes:,} bytes; a daemon may use at most "
        f"{plan.requested_bytes:,}"
    )
    yield ""
    yield from _table([_row(rank) for rank in ranks])
    yield ""
    if most := max(rank.state_bytes for rank in ranks):
        rows = _count(plan.max_num_seqs, "request")
        yield f"layers that keep states take up to {most:,} bytes of a rank for {rows}"
        if plan.checkpoint_tokens:
            yield (
                f"a checkpoint of a request's state every {plan.checkpoint_tokens:,} tokens: up to "
                f"{max(rank.checkpoint_bytes for rank in ranks):,} bytes of a rank for all blocks"
            )
    elif not plan.layer_groups[0].num_layers:
        yield "the group: no KV cache, a prompt is computed in one step"
        yield from _notes()
        return
    yield (
        f"the group: {plan.num_blocks:,} blocks of {plan.block_size} tokens in "
        f"{plan.kv_cache_dtype}, one of them the null block: {plan.num_tokens:,} tokens, "
        f"{_count(plan.num_longest_requests, 'request')} of {length:,} tokens at once"
    )
    if len(plan.layer_groups) > 1 or plan.layer_groups[0].sliding_window is not None:
        yield from _layer_groups(plan)
    verdict = "fits" if plan.max_model_len_fits else "does not fit"
    yield f"max_model_len {length:,} {verdict}; the longest that would: {plan.longest_model_len:,}"
    yield (
        f"kv_cache_memory_bytes for the request: {plan.kv_cache_memory_bytes_request:,}; to fill "
        f"the card, if nothing else ran on it: {plan.kv_cache_memory_bytes_card:,}"
    )
    if plan.num_host_blocks:
        yield (
            f"the host tier: {plan.num_host_blocks:,} blocks, up to "
            f"{max(rank.host_tier_bytes for rank in ranks):,} bytes of "
            f"{plan.kv_tier_memory} memory of a rank"
        )
    yield from _notes()


def _notes() -> Iterator[str]:
    yield ""
    yield (
        "The largest step is an estimate: the tensors alive at its peak, from their shapes, and "
        f"{100 // MARGIN_DIVISOR} % more."
    )
    yield "Not counted: " + "; ".join(NOT_COUNTED) + "."


def _layer_groups(plan: GroupPlan) -> Iterator[str]:
    for group in plan.layer_groups:
        window = group.sliding_window
        kind = "of full attention" if window is None else f"with a window of {window:,} tokens"
        yield (
            f"{_count(group.num_layers, 'layer')} {kind}: a request of {plan.max_model_len:,} "
            f"tokens has {group.num_blocks_longest_request:,} blocks of {group.block_size} at once"
        )
    now, before = plan.longest_request_bytes, plan.longest_request_bytes_without_windows
    yield (
        f"a request of {plan.max_model_len:,} tokens takes {now:,} bytes of KV cache on all ranks, "
        f"{100 * (before - now) // before} % less than the {before:,} that it would without windows"
    )


def _row(rank: RankPlan) -> list[str]:
    last_layer = rank.first_layer + rank.num_layers - 1
    return [
        str(rank.rank),
        str(rank.pp_rank),
        str(rank.tp_rank),
        f"{rank.first_layer}-{last_layer}",
        f"{rank.weights_bytes:,}",
        f"{rank.adapter_bytes:,}",
        f"{rank.rotary_table_bytes:,}",
        f"{rank.step_estimate_bytes:,}",
        f"{rank.kv_available_bytes:,}",
        f"{rank.kv_block_bytes:,}",
        f"{rank.num_blocks:,}",
        f"{rank.num_tokens:,}",
        f"{rank.num_longest_requests:,}",
    ]


def _table(rows: Sequence[Sequence[str]]) -> Iterator[str]:
    height = max(map(len, _HEADINGS))
    padded = [[*heading, *[""] * (height - len(heading))] for heading in _HEADINGS]
    lines = [*zip(*padded, strict=True), *rows]
    widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
    for line in lines:
        cells = (cell.rjust(width) for cell, width in zip(line, widths, strict=True))
        yield "  ".join(cells).rstrip()


def _count(number: int, noun: str) -> str:
    return f"{number:,} {noun}" + ("" if number == 1 else "s")

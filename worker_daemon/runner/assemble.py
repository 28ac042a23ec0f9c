"""Puts a model runner together from its parts: the one place that knows which part serves which
place in the group."""

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from worker_daemon.distributed.bubbles import UnmeasuredWaits, input_waits
from worker_daemon.distributed.link import Link
from worker_daemon.distributed.parallel_state import ParallelState
from worker_daemon.distributed.pp import NoOutbound, StageInbound, StageOutbound
from worker_daemon.distributed.tokens import LocalTokens, TokenBroadcast, TokenReturn
from worker_daemon.distributed.tp import TensorParallel
from worker_daemon.kernels.tiles import DeviceLimits, length_bounds
from worker_daemon.models.decoder import DecoderStage
from worker_daemon.runner.cuda_graph import LadderGraphs, NoGraphs, StepGraphs
from worker_daemon.runner.input_batch import InputBuilder, most_seqs, staging_capacity
from worker_daemon.runner.kv_cache import LayerKV
from worker_daemon.runner.model_runner import ModelRunner, StageEnds
from worker_daemon.runner.parts.registry import make_parts
from worker_daemon.runner.parts.step_parts import StepParts
from worker_daemon.runner.request_state import RequestState
from worker_daemon.runner.row_tables import RowKernels, RowTables
from worker_daemon.runner.scheduled_step import StepLimits
from worker_daemon.runner.stage_ends import (
    EarlierStageExit,
    FirstStageEntry,
    LastStageExit,
    LaterStageEntry,
    StageEntry,
    StageExit,
)
from worker_daemon.runner.stage_program import (
    ArrivedFront,
    EagerProgram,
    EmbeddingFront,
    NoSink,
    RowSink,
    ScoringBack,
    SendingBack,
)
from worker_daemon.runner.staging import OpenStaging, TokenStore
from worker_daemon.runner.step_layout import (
    ExactShapes,
    StepLadder,
    decode_sizes,
    mixed_plans,
)
from worker_daemon.runner.token_history import NoHistory, SampledTokens, TokenHistory
from worker_daemon.sample.sampler import Sampling


@dataclass(frozen=True, slots=True)
class RunnerParts:
    """What a runner is made of that outlives it."""

    parallel: ParallelState
    tp: TensorParallel
    stage: DecoderStage
    hidden_size: int
    dtype: torch.dtype
    device: torch.device
    capture_stream: torch.cuda.Stream | None
    """Where graphs are captured; None on the CPU."""
    sampling: Sampling
    rows: RowKernels
    open_staging: OpenStaging

    @property
    def depth(self) -> int:
        """Steps whose buffers must not be overwritten: those in flight, and the one being built."""
        return self.parallel.pp_size + 2


def assemble_runner(
    parts: RunnerParts, link: Link, limits: StepLimits, kv: Sequence[LayerKV]
) -> ModelRunner:
    """Return a runner with empty rows. kv: one a local layer, or none for NullAttention."""
    parallel = parts.parallel
    step_parts = make_parts(
        limits,
        parts.device,
        parts.sampling,
        is_first_stage=parallel.is_first_stage,
        is_last_stage=parallel.is_last_stage,
    )
    state = RequestState(limits, step_parts)
    tables = RowTables(limits, parts.device, parts.rows)
    buffers = parts.open_staging(
        staging_capacity(state), most_seqs(state), parts.depth, delivers=parallel.pp_size == 1
    )
    inputs = InputBuilder(state, tables, buffers, ExactShapes())
    history = _token_history(parts, state)
    return ModelRunner(
        _eager_program(parts, tables, kv, buffers, step_parts),
        state,
        inputs,
        tie_stage(parts, link, limits, inputs, step_parts, history),
        no_hidden=torch.zeros((1, parts.hidden_size), dtype=parts.dtype, device=parts.device),
        rank=parallel.rank,
        tp_size=parallel.tp_size,
        num_ranks=parallel.world_size,
        waits=UnmeasuredWaits() if parallel.pp_size == 1 else input_waits(parts.device),
        history=history,
    )


def _token_history(parts: RunnerParts, state: RequestState) -> TokenHistory:
    if not parts.parallel.is_output_rank:
        return NoHistory()
    return SampledTokens(state.spare_slot + 1, state.limits.max_model_len)


def step_graphs(parts: RunnerParts, runner: ModelRunner, *, enforce_eager: bool) -> StepGraphs:
    """Return what may be captured of a runner's steps: nothing on the CPU, or if eager is asked
    for."""
    if parts.device.type != "cuda" or enforce_eager:
        return NoGraphs()
    limits = runner.state.limits
    num_kv_heads = parts.stage.kv_layer_specs[0].num_kv_heads
    device_limits = DeviceLimits.of(parts.device)
    num_groups = limits.num_groups
    ladder = StepLadder(
        decode_sizes(limits.max_num_seqs),
        lambda size: length_bounds(size, num_kv_heads, limits.max_model_len, device_limits),
        mixed_plans(
            limits.max_num_seqs, limits.max_num_batched_tokens, limits.max_model_len, num_groups
        ),
        num_groups,
    )
    largest = max(plan.shape.num_tokens for plan in ladder.plans)
    arriving = 0 if parts.parallel.is_first_stage else largest
    return LadderGraphs(
        ladder,
        runner.eager,
        torch.zeros((arriving, parts.hidden_size), dtype=parts.dtype, device=parts.device),
        parts.capture_stream,
        holds_communication=parts.parallel.tp_size > 1,
    )


def _eager_program(
    parts: RunnerParts,
    tables: RowTables,
    kv: Sequence[LayerKV],
    store: TokenStore,
    step_parts: StepParts,
) -> EagerProgram:
    parallel = parts.parallel
    embeds_next = parallel.pp_size == 1
    sink = RowSink(store, tables.last_sampled) if embeds_next else NoSink()
    return EagerProgram(
        parts.stage,
        tables,
        kv,
        EmbeddingFront(parts.stage) if parallel.is_first_stage else ArrivedFront(),
        ScoringBack(parts.stage, sink) if parallel.is_last_stage else SendingBack(),
        step_parts,
    )


def tie_stage(
    parts: RunnerParts,
    link: Link,
    limits: StepLimits,
    inputs: InputBuilder,
    step_parts: StepParts,
    history: TokenHistory,
) -> StageEnds:
    """Return the ends that tie this stage to its neighbours over a link."""
    tokens = _token_return(parts, link, inputs)
    return StageEnds(
        entry=_entry(parts, link, limits, tokens),
        exit=_exit(parts, link, step_parts, inputs.tables, tokens, history),
        tokens=tokens,
        outbound=NoOutbound()
        if parts.parallel.is_last_stage
        else StageOutbound(
            link,
            parts.tp,
            hidden_size=parts.hidden_size,
            dtype=parts.dtype,
            device=parts.device,
            max_num_tokens=limits.max_num_batched_tokens,
            depth=parts.depth,
        ),
    )


def _token_return(parts: RunnerParts, link: Link, inputs: InputBuilder) -> TokenReturn:
    if parts.parallel.pp_size == 1:
        return LocalTokens(inputs.tables.last_sampled)
    tables = inputs.tables
    return TokenBroadcast(
        link,
        tables.last_sampled,
        tables.refused,
        num_stages=parts.parallel.pp_size,
        depth=parts.depth,
    )


def _entry(parts: RunnerParts, link: Link, limits: StepLimits, tokens: TokenReturn) -> StageEntry:
    if parts.parallel.is_first_stage:
        nothing = torch.empty((0, parts.hidden_size), dtype=parts.dtype, device=parts.device)
        # Without another stage nobody on the device reads the status.
        reader = "cpu" if parts.parallel.pp_size == 1 else parts.device
        return FirstStageEntry(tokens, nothing, torch.device(reader))
    return LaterStageEntry(
        StageInbound(
            link,
            parts.tp,
            hidden_size=parts.hidden_size,
            dtype=parts.dtype,
            device=parts.device,
            max_num_tokens=limits.max_num_batched_tokens,
            depth=parts.depth,
        ),
        tokens,
    )


def _exit(
    parts: RunnerParts,
    link: Link,
    step_parts: StepParts,
    tables: RowTables,
    tokens: TokenReturn,
    history: TokenHistory,
) -> StageExit:
    if not parts.parallel.is_last_stage:
        return EarlierStageExit(step_parts, tokens)
    return LastStageExit(
        parts.stage,
        step_parts,
        tables,
        tokens,
        link,
        history,
        replies=parts.parallel.is_output_rank,
    )

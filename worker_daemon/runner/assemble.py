"""Assembles a model runner from its parts, by the rank's place in the group."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import TypeAlias

import torch

from worker_daemon.contracts.logits_processor import MakeLogitsProcessor
from worker_daemon.contracts.sampling import Sampling
from worker_daemon.contracts.uploads import FindUpload
from worker_daemon.distributed.bubbles import InputWaits, input_waits
from worker_daemon.distributed.ep import ReplicaExperts
from worker_daemon.distributed.link import Link
from worker_daemon.distributed.parallel_state import ParallelState
from worker_daemon.distributed.pp import HopShape, StageInbound, StageOutbound
from worker_daemon.distributed.tokens import TokenBroadcast
from worker_daemon.distributed.tp import TensorParallel
from worker_daemon.drafting.interface import MakeDrafter
from worker_daemon.kernels.tiles import DeviceLimits, length_bounds
from worker_daemon.layers.cache_spec import KVLayerSpec, StateLayerSpec
from worker_daemon.lora.adapters import Adapters
from worker_daemon.models.decoder import DecoderStage
from worker_daemon.models.weight_state import WeightState
from worker_daemon.runner.connectors.kv_connectors import KVConnectors
from worker_daemon.runner.cuda_graph import LadderGraphs, StepGraphs
from worker_daemon.runner.draft_verifier import DraftVerifier
from worker_daemon.runner.input_batch import InputBuilder, staging_capacity
from worker_daemon.runner.kv_cache import LayerKV
from worker_daemon.runner.model_runner import ModelRunner, SoleStage, Stage
from worker_daemon.runner.output import StepReplies
from worker_daemon.runner.parts.registry import make_parts
from worker_daemon.runner.pipeline_stage import Neighbours, PipelineStage
from worker_daemon.runner.proposal_graphs import (
    DraftModelProposals,
    ProposalInputs,
    Proposals,
)
from worker_daemon.runner.replica_counts import ReplicaCounts
from worker_daemon.runner.request_state import RequestState
from worker_daemon.runner.routed_experts import (
    KeptExperts,
    ReplayTarget,
    StageExperts,
    StageRouting,
)
from worker_daemon.runner.row_tables import RowKernels, RowTables
from worker_daemon.runner.scheduled_step import StepLimits
from worker_daemon.runner.shared_experts import SharedExperts
from worker_daemon.runner.shared_ladder import SharedLadder
from worker_daemon.runner.stage_program import EagerProgram
from worker_daemon.runner.staging import OpenStaging
from worker_daemon.runner.step_layout import (
    ExactShapes,
    ProposalLadder,
    StepLadder,
    decode_sizes,
    drafted_counts,
    largest_shape,
    mixed_plans,
    mixed_sizes,
    proposal_sizes,
)
from worker_daemon.runner.step_sampler import StepSampler
from worker_daemon.runner.token_history import SampledTokens, TokenHistory
from worker_host.draft_counts import DraftCounts

OpenConnectors: TypeAlias = Callable[[RequestState, TokenHistory], KVConnectors]


@dataclass(frozen=True, slots=True)
class RunnerParts:
    """Objects that a runner uses and that outlive it."""

    parallel: ParallelState
    tp: TensorParallel
    stage: DecoderStage
    weights: WeightState
    hidden_size: int
    layer_weights: int
    """Weights by which a layer multiplies a token, on one rank."""
    dtype: torch.dtype
    device: torch.device
    capture_stream: torch.cuda.Stream | None
    """Stream on which graphs are captured; None on the CPU."""
    sampling: Sampling
    rows: RowKernels
    open_staging: OpenStaging
    processors: Mapping[str, MakeLogitsProcessor]
    find_upload: FindUpload
    make_drafter: MakeDrafter
    """Makes the drafter of the last stage; returns None on the others."""
    adapters: Adapters | None = None
    draft_counts: DraftCounts = field(default_factory=DraftCounts)
    """Outcomes of drafts, on the rank that answers steps."""
    routing: StageRouting | None = None
    """None: the experts of tokens are not kept."""
    open_connectors: OpenConnectors | None = None
    """Opens the KV connectors; None: no blocks leave the KV cache."""
    experts: ReplicaExperts | None = None
    """The ranks of all replicas that share the stage's experts; None: no other replica's."""

    @property
    def communicates(self) -> bool:
        """True if the forward pass of a stage has collectives."""
        return self.parallel.tp_size > 1 or self.experts is not None

    @property
    def depth(self) -> int:
        """Number of steps whose buffers must not be overwritten: those in flight, and the one being
        built."""
        return self.parallel.pp_size + 2

    @property
    def width_in(self) -> int:
        """Values of a token in a message from the previous stage."""
        more = 0 if self.routing is None else self.routing.width_in(self.dtype)
        return self.hidden_size + more

    @property
    def width_out(self) -> int:
        """Values of a token in a message to the next stage."""
        more = 0 if self.routing is None else self.routing.width_out(self.dtype)
        return self.hidden_size + more


def assemble_runner(
    parts: RunnerParts, link: Link, limits: StepLimits, kv: Sequence[LayerKV]
) -> ModelRunner:
    """Return a runner with empty rows. kv: one LayerKV per local layer, or none for
    NullAttention."""
    parallel = parts.parallel
    has_states = any(isinstance(spec, StateLayerSpec) for spec in parts.stage.kv_layer_specs)
    own_limits = limits if has_states else replace(limits, checkpoint_blocks=0)
    tables = RowTables(own_limits, parts.device, parts.rows)
    kept_experts = _kept_experts(parts, limits, tables)
    step_parts = make_parts(
        limits,
        parts.device,
        parts.sampling,
        is_first_stage=parallel.is_first_stage,
        is_last_stage=parallel.is_last_stage,
        pooler=parts.stage.pooler,
        encoder=parts.stage.encoder,
        adapters=parts.adapters,
        processors=parts.processors,
        dtype=parts.dtype,
        find_upload=parts.find_upload,
        kept_experts=kept_experts,
        replay=_replay_target(parts),
    )
    lockstep = None
    if parallel.lockstep:
        lockstep = ReplicaCounts(parallel.dp_rank, parallel.dp_size)
    state = RequestState(limits, step_parts, lockstep)
    is_sole = parallel.pp_size == 1
    most_samples = largest_shape(limits).num_samples
    buffers = parts.open_staging(
        staging_capacity(state), most_samples, parts.depth, delivers=is_sole
    )
    drafter = parts.make_drafter(tables.group_tables[0])
    inputs = InputBuilder(state, tables, buffers, ExactShapes(), drafter)
    history = _token_history(parts, state)
    waits = None if is_sole else input_waits(parts.device)
    logits = parts.stage.new_logits(most_samples) if parts.stage.samples else None
    tokens = buffers if is_sole else None
    verifies = parts.stage.samples and limits.max_drafts > 0
    verifier = DraftVerifier(tables, drafter) if verifies else None
    return ModelRunner(
        EagerProgram(
            parts.stage,
            tables,
            kv,
            step_parts,
            tokens,
            logits,
            drafter,
            verifier,
            _stage_experts(parts, kept_experts),
            shares_experts=parts.experts is not None,
        ),
        state,
        inputs,
        tie_stage(parts, link, state, inputs, waits, history),
        parts.weights,
        rank=parallel.rank,
        tp_size=parallel.tp_size,
        num_ranks=parallel.world_size,
        waits=waits,
        history=history,
        connectors=None if parts.open_connectors is None else parts.open_connectors(state, history),
        shared_experts=(
            None if parts.experts is None else SharedExperts(parts.experts, parts.stage)
        ),
    )


def _kept_experts(parts: RunnerParts, limits: StepLimits, tables: RowTables) -> KeptExperts | None:
    """Return the memory of tokens' experts on the last stage, if they are kept."""
    routing = parts.routing
    if routing is None or not parts.parallel.is_last_stage:
        return None
    most = largest_shape(limits).num_tokens
    return KeptExperts(routing.shape, routing.pages, tables.group_tables[0], most)


def _replay_target(parts: RunnerParts) -> ReplayTarget | None:
    routing, chosen = parts.routing, parts.stage.chosen_experts
    if routing is None or chosen is None:
        return None
    end = routing.num_before + routing.num_here
    return ReplayTarget(chosen, slice(routing.num_before, end))


def _stage_experts(parts: RunnerParts, kept: KeptExperts | None) -> StageExperts | None:
    chosen = parts.stage.chosen_experts
    if parts.routing is None or chosen is None:
        return None
    return StageExperts(parts.routing, chosen, parts.hidden_size, kept)


def tie_stage(
    parts: RunnerParts,
    link: Link,
    state: RequestState,
    inputs: InputBuilder,
    waits: InputWaits | None,
    history: TokenHistory,
) -> Stage:
    """Return the stage on a link. waits: None on a sole stage."""
    parallel = parts.parallel
    replies = StepReplies(link, history, parts.draft_counts, is_output_rank=parallel.is_output_rank)
    sampler = StepSampler(parts.stage, state.parts, inputs.tables, inputs.drafter)
    no_hidden = torch.zeros((1, parts.width_out), dtype=parts.dtype, device=parts.device)
    if waits is None:
        return SoleStage(inputs, state.parts, sampler, replies, no_hidden[:0])
    last = sampler if parallel.is_last_stage else None
    neighbours = _neighbours(parts, link, state.limits, inputs.tables)
    return PipelineStage(state, inputs, neighbours, waits, last, replies, no_hidden)


def _neighbours(
    parts: RunnerParts, link: Link, limits: StepLimits, tables: RowTables
) -> Neighbours:
    parallel, most_tokens = parts.parallel, limits.max_num_batched_tokens
    inbound = HopShape(parts.width_in, parts.dtype, parts.device, most_tokens, parts.depth)
    outbound = inbound._replace(hidden_size=parts.width_out)
    return Neighbours(
        None if parallel.is_first_stage else StageInbound(link, parts.tp, inbound),
        None if parallel.is_last_stage else StageOutbound(link, parts.tp, outbound),
        TokenBroadcast(
            link,
            tables.last_sampled,
            tables.refused,
            tables.drafts if limits.makes_drafts else None,
            num_stages=parallel.pp_size,
            depth=parts.depth,
        ),
    )


def _token_history(parts: RunnerParts, state: RequestState) -> TokenHistory:
    if not parts.parallel.is_output_rank:
        return TokenHistory()
    return SampledTokens(state.spare_slot + 1, state.limits.max_model_len)


def step_graphs(parts: RunnerParts, runner: ModelRunner, *, enforce_eager: bool) -> StepGraphs:
    """Return the graphs of a runner's steps: none on the CPU, for an encoder, if eager is
    requested, or of shared experts whose exchanges no graph can hold."""
    if parts.device.type != "cuda" or enforce_eager or not parts.stage.kv_layer_specs:
        return StepGraphs()
    limits = runner.state.limits
    num_groups = limits.num_groups
    ladder = StepLadder(
        decode_sizes(limits.max_num_seqs) if limits.generates else [],
        _length_bounds(parts.stage, limits, parts.device),
        mixed_plans(
            limits.max_num_seqs,
            limits.max_num_batched_tokens,
            limits.max_model_len,
            num_groups,
            mixed_sizes(parts.layer_weights),
            limits.max_num_samples,
        ),
        num_groups,
        drafts=drafted_counts(limits.max_drafts),
        max_num_tokens=limits.max_num_batched_tokens,
    )
    exchange = parts.experts
    chosen: StepLadder | SharedLadder = ladder
    if exchange is not None:
        chosen = SharedLadder(ladder.plans, parts.stage.most_graphed)
        if not chosen.plans:
            return StepGraphs()
    largest = max(plan.shape.num_tokens for plan in chosen.plans)
    arriving = 0 if parts.parallel.is_first_stage else largest
    return LadderGraphs(
        chosen,
        runner.eager,
        torch.zeros((arriving, parts.width_in), dtype=parts.dtype, device=parts.device),
        parts.capture_stream,
        holds_communication=parts.communicates,
        proposals=_proposals(runner, parts.device),
        exchange=exchange,
    )


def _proposals(runner: ModelRunner, device: torch.device) -> Proposals:
    """Return those of the runner's draft model, if it has one."""
    drafter, limits = runner.inputs.drafter, runner.state.limits
    follower = None if drafter is None else drafter.follower
    if follower is None:
        return Proposals()
    sizes = proposal_sizes(limits.max_num_seqs)
    inputs = ProposalInputs(sizes[-1], limits.max_drafts, runner.state.parts.chooser, device)
    ladder = ProposalLadder(sizes, _length_bounds(follower.stage, limits, device))
    return DraftModelProposals(follower, ladder, inputs)


def _length_bounds(
    stage: DecoderStage, limits: StepLimits, device: torch.device
) -> Callable[[int], list[int]]:
    """Return what bounds the context lengths of so many decodes through a stage's layers."""
    specs = [spec for spec in stage.kv_layer_specs if isinstance(spec, KVLayerSpec)]
    # A latent is read like one KV head that all query heads share.
    num_kv_heads = specs[0].num_kv_heads if specs else 1
    return partial(
        length_bounds,
        num_kv_heads=num_kv_heads,
        longest=limits.max_model_len,
        limits=DeviceLimits.of(device),
        has_fp8_cache=bool(stage.kv_scales),
    )

"""Exchanges of replicas that share experts: in each step all make the same, of the same sizes, for
random mixes of steps, idle replicas, deferred sampling, refused steps and failures."""

from dataclasses import replace
from functools import partial

import msgspec
import numpy as np
import pytest
import torch
from row_steps import NaiveRows, Plan, StepGenerator, encode

from rpc_schema.errors import InvalidStepError, PrecededByError
from rpc_schema.step import SampleTokens
from worker_daemon.contracts.attention import AttentionMetadata
from worker_daemon.contracts.experts import RoutedTokens
from worker_daemon.contracts.source_identity import SourceIdentity
from worker_daemon.distributed import ep
from worker_daemon.distributed.link import Link
from worker_daemon.distributed.parallel_state import ParallelState
from worker_daemon.distributed.tp import SingleRank
from worker_daemon.layers.attention import NullAttention
from worker_daemon.layers.torch_ops import TorchOps
from worker_daemon.models.config import parse_model_config
from worker_daemon.models.decoder import build_stage
from worker_daemon.models.weight_state import WeightState
from worker_daemon.runner.input_batch import InputBuilder
from worker_daemon.runner.model_runner import ModelRunner, SoleStage
from worker_daemon.runner.output import StepReplies
from worker_daemon.runner.parts.registry import make_parts
from worker_daemon.runner.parts.step_parts import SamplerOutput
from worker_daemon.runner.replica_counts import ReplicaCounts
from worker_daemon.runner.request_state import RequestState
from worker_daemon.runner.row_tables import RowTables, TorchRowKernels
from worker_daemon.runner.sample_rows import SamplingInputs
from worker_daemon.runner.scheduled_step import StepLimits
from worker_daemon.runner.shared_experts import SharedExperts
from worker_daemon.runner.shared_ladder import SharedLadder
from worker_daemon.runner.stage_program import StageOutput
from worker_daemon.runner.staging import HostStaging
from worker_daemon.runner.step_layout import ExactShapes, StepLadder, mixed_plans
from worker_daemon.runner.token_history import TokenHistory
from worker_daemon.sample.sampler import TorchSampling
from worker_host.draft_counts import DraftCounts

CPU = torch.device("cpu")
LIMITS = StepLimits(8, 40, 30, 60, 4, 60, max_samples_per_seq=3)
LAYERS, HIDDEN = 4, 8
MODEL = {
    "architectures": ["Qwen3MoeForCausalLM"],
    "vocab_size": 60,
    "hidden_size": HIDDEN,
    "intermediate_size": 8,
    "moe_intermediate_size": 8,
    "num_hidden_layers": LAYERS,
    "num_attention_heads": 1,
    "num_key_value_heads": 1,
    "head_dim": 8,
    "max_position_embeddings": 64,
    "num_experts": 7,
    "num_experts_per_tok": 2,
    "mlp_only_layers": [1],
}
SHARED_LAYERS = LAYERS - 1
ROW_BYTES = 4 * (HIDDEN + 2 * 2)
"""Those of a token, its experts and their weights."""
DECODE_SIZES = [1, 2, 8]
MIXED_SIZES = {"exact": [], "few": [4], "all": [4, 8, 24, 40]}
FATES = ("refused", "build", "attend", "choose")
"""Why a replica's own step may fail: before it begins, and before, between and behind exchanges."""


class Injected(Exception):
    """What fails."""


def ladder_of(kind):
    """The ladder of a step's sizes: none; with room for few steps; with plans for all."""
    if kind == "exact":
        return ExactShapes()
    few = kind == "few"
    longest = 20 if few else LIMITS.max_model_len
    mixed = mixed_plans(
        LIMITS.max_num_seqs, 40, longest, 1, MIXED_SIZES[kind], LIMITS.max_num_samples
    )
    ladder = StepLadder(DECODE_SIZES, lambda size: [longest // 2, longest], mixed)
    return SharedLadder(ladder.plans, most_tokens=40)


def padded(kind, num_tokens, are_decodes):
    """The size of a step in which the replica with the most has so many tokens."""
    if kind == "exact" or not num_tokens:
        return num_tokens
    sizes = [*(DECODE_SIZES if are_decodes else ()), *MIXED_SIZES[kind]]
    return next((size for size in sizes if size >= num_tokens), num_tokens)


class Replica:
    """The runner of one replica, whose exchanges reach nobody."""

    def __init__(self, rng, dp_rank, dp_size, ladder, made):
        """ladder: pads steps, and has plans with graphs; made: notes the exchanges of graphs."""
        self.rng, self.fails_at, self.num_layers = rng, "", 0
        self.num_graphs, self.made = 0, made
        self.exchange = exchange = ep.ReplicaExperts(
            ParallelState(1, 1, dp_rank, dp_size, lockstep=True)
        )
        config = replace(parse_model_config(MODEL), expert_parallel=True)
        self.decoder = build_stage(
            config, range(LAYERS), True, False, SingleRank(), torch.float32, CPU, 64,
            NullAttention(), TorchOps(), replica_experts=exchange,
        )  # fmt: skip
        self.decoder.set_attention(self)
        parts = make_parts(LIMITS, CPU, TorchSampling())
        self.state = RequestState(LIMITS, parts, ReplicaCounts(dp_rank, dp_size))
        tables = RowTables(LIMITS, CPU, TorchRowKernels())
        inputs = InputBuilder(self.state, tables, HostStaging(), ladder)
        self.plans = getattr(ladder, "plans", ())
        history = TokenHistory()
        replies = StepReplies(Link(1, CPU), history, DraftCounts(), is_output_rank=True)
        stage = SoleStage(inputs, parts, self, replies, torch.zeros(0, HIDDEN))
        weights = WeightState([], SourceIdentity(b"files"), 0)
        self.runner = ModelRunner(
            self, self.state, inputs, stage, weights,
            rank=dp_rank, tp_size=1, num_ranks=dp_size, waits=None, history=history,
            shared_experts=SharedExperts(exchange, self.decoder),
        )  # fmt: skip
        self.rows, self.steps = NaiveRows(LIMITS), StepGenerator(rng, LIMITS)

    def reach(self, place):
        if place == self.fails_at:
            self.fails_at = ""
            raise Injected(place)

    def draw(self, seq):
        """A random step, often an idle one: (message, frames, counts)."""
        plan = self.steps.draw(self.rows) if self.rng.random() < 0.7 else Plan()
        for new in plan.admissions:
            new.sampling = type(new.sampling)()
        message, frames = encode(seq, plan, self.rows)
        ran = self.rows.apply(seq, plan)
        for slot, (_, _, samples) in ran.items():
            self.rows.requests[slot].sampled += [0] * bool(samples)
        return message, frames, (len(ran), message.total_num_scheduled_tokens)

    def run(self, inputs, arrived):
        """The program's."""
        self.reach("build")
        self.num_layers = 0
        count, nothing = inputs.plan.shape.num_tokens, torch.empty(0, dtype=torch.int32)
        if inputs.plan in self.plans and self.exchange.has_size_of(count):
            self.num_graphs += 1
            assert count >= inputs.num_tokens
            self.exchange.replay(partial(self.recorded, count))
            return self.chosen(inputs, torch.zeros(count, HIDDEN))
        metadata = AttentionMetadata(
            torch.tensor([0, count], dtype=torch.int32),
            *[nothing] * 5,
            num_seqs=1,
            max_query_len=1,
            max_seq_len=1,
            query_lens_np=nothing.numpy(),
            seq_lens_np=nothing.numpy(),
        )
        hidden = torch.zeros(count, HIDDEN)
        positions = torch.zeros(count, dtype=torch.int64)
        hidden = self.decoder.forward(hidden, positions, (), [metadata] * LAYERS)
        return self.chosen(inputs, hidden)

    def recorded(self, count):
        """Make a graph's exchanges: those of its capture."""
        for _ in range(SHARED_LAYERS):
            self.made.append(("gather", self.exchange.size * count * ROW_BYTES))
            self.made.append(("reduce", self.exchange.size * count * HIDDEN))

    def chosen(self, inputs, hidden):
        self.reach("choose")
        num_samples = inputs.sample_rows.slots_np.size
        greedy = torch.zeros(num_samples, dtype=torch.int64)
        return StageOutput(hidden, SamplingInputs(torch.zeros(num_samples, HIDDEN), greedy))

    def rotate_and_attend(self, *args, **options):
        """The attention's."""
        self.num_layers += 1
        if self.num_layers > self.rng.integers(0, LAYERS):
            self.reach("attend")
        return NullAttention().rotate_and_attend(*args, **options)

    drafter = None

    def sample(self, step):
        """The sampler's."""
        return SamplerOutput(step.chosen.greedy)


@pytest.fixture
def made(monkeypatch):
    """The exchanges that are made, as (kind, values)."""
    exchanges = []

    def gather(out, own, group):
        exchanges.append(("gather", out.numel()))
        out.view(-1, own.numel()).copy_(own.expand(out.numel() // own.numel(), -1))

    monkeypatch.setattr(ep, "all_gather", gather)
    reduce = staticmethod(lambda total, group: exchanges.append(("reduce", total.numel())))
    monkeypatch.setattr(ep.dist, "all_reduce", reduce)
    return exchanges


def step_all(replicas, made, requests):
    """Run a step on each replica, and compare their exchanges. Return these, and what each has
    raised."""
    by_replica, raised = [], []
    for replica, (message, frames) in zip(replicas, requests, strict=True):
        made.clear()
        own = None
        try:
            if isinstance(message, SampleTokens):
                replica.runner.sample_tokens(message, frames)
            else:
                replica.runner.execute_model(message, frames)
        except (Injected, InvalidStepError, PrecededByError) as error:
            own = type(error)
        by_replica.append([*made])
        raised.append(own)
    assert all(own == by_replica[0] for own in by_replica), by_replica
    return by_replica[0], raised


def test_kernels_are_compiled_without_peers(made):
    """For as many rows as they would bring."""
    exchange = ep.ReplicaExperts(ParallelState(1, 1, 1, 3, lockstep=True))
    x, experts, rows = torch.randn(5, HIDDEN), torch.zeros(5, 2, dtype=torch.int32), []
    exchange.begin(7, reaches_peers=False)
    routed = RoutedTokens(experts, experts.float())
    result = exchange.run(x, routed, lambda x, _: rows.append(x.shape[0]))
    assert (result.shape, rows, made) == (x.shape, [21], [])


def with_counts(message, counts):
    return msgspec.structs.replace(message, replica_counts=np.array(counts, "<i4").tobytes())


@pytest.mark.parametrize("num_replicas", [2, 3])
@pytest.mark.parametrize("kind", ["exact", "few", "all"])
def test_all_replicas_make_the_same_exchanges_whatever_becomes_of_a_step(made, num_replicas, kind):
    """The link stays after such failures, so nobody may wait for an exchange."""
    seed = int(np.random.default_rng().integers(1 << 30))
    rng = np.random.default_rng(seed)
    print(f"seed {seed}")
    num_failed = dict.fromkeys(FATES, 0)
    num_runs = num_sampled = num_graphs = 0
    expected_fates = [fate for fate in FATES if kind != "all" or fate != "attend"]
    while num_runs < 10 or not (num_sampled and all(num_failed[fate] for fate in expected_fates)):
        num_runs += 1
        assert num_runs < 200, (num_failed, num_sampled)
        ladder = ladder_of(kind)
        replicas = [
            Replica(rng, place, num_replicas, ladder, made) for place in range(num_replicas)
        ]
        seq, has_failed = 0, [False] * num_replicas
        for _ in range(12):
            seq += 1
            drawn = [replica.draw(seq) for replica in replicas]
            counts = [own for _, _, own in drawn]
            requests = [(with_counts(message, counts), [*frames]) for message, frames, _ in drawn]
            failing, fate = int(rng.integers(num_replicas)), ""
            if rng.random() < 0.1:
                fate = str(rng.choice(FATES))
                if fate == "refused":
                    requests[failing][1].insert(0, b"no such frame")
                else:
                    replicas[failing].fails_at = fate
            exchanges, raised = step_all(replicas, made, requests)
            most = max(num_tokens for _, num_tokens in counts)
            assert len(exchanges) == (2 * SHARED_LAYERS if most else 0)
            are_decodes = all(num_seqs == num_tokens for num_seqs, num_tokens in counts)
            rows = num_replicas * padded(kind, most, are_decodes)
            reduced = [size for kind, size in exchanges if kind == "reduce"]
            assert reduced == [rows * HIDDEN] * (SHARED_LAYERS if most else 0)
            if raised[failing] in (Injected, InvalidStepError) and not has_failed[failing]:
                num_failed[fate] += 1
            for place, own in enumerate(raised):
                assert (own is None) or has_failed[place] or (place == failing and fate)
                has_failed[place] = has_failed[place] or own is not None
            for replica in replicas:
                replica.fails_at = ""
            deferring = [place for place in range(num_replicas) if replicas[place].rows.unsampled]
            if any(has_failed) or not deferring:
                continue
            sampling = int(rng.choice(deferring))
            unsampled = replicas[sampling].rows.unsampled
            step_seq = next((own for own, slots in unsampled.items() if slots), None)
            if step_seq is None:
                continue
            del unsampled[step_seq]
            seq += 1
            idle = encode(seq, Plan(), NaiveRows(LIMITS))[0]
            idle = with_counts(idle, [(0, 0)] * num_replicas)
            later = [(idle, []) for _ in replicas]
            later[sampling] = SampleTokens(epoch=1, link=1, seq=seq, step_seq=step_seq), []
            assert step_all(replicas, made, later) == ([], [None] * num_replicas)
            num_sampled += 1
        num_graphs += sum(replica.num_graphs for replica in replicas)
    assert (num_graphs > 0) == (kind != "exact")

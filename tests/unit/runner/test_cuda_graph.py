"""Graphed programs, with a fake graph that reruns its program on the current content of its
addresses: padding, fixed addresses and kept outputs must not change the tokens."""

import itertools
import json
from contextlib import nullcontext
from types import SimpleNamespace

import msgspec
import numpy as np
import pytest
import torch
from row_steps import Admission, NaiveRows, Plan, encode, request_state
from tensor_attention import TensorAttention

from rpc_schema.base import Count, Extension
from rpc_schema.step import ExecuteModel
from worker_client.requests import SamplingParams
from worker_daemon.distributed.tp import SingleRank
from worker_daemon.layers.torch_ops import TorchOps
from worker_daemon.models.config import read_model_config
from worker_daemon.models.decoder import build_stage
from worker_daemon.models.partition import partition_layers
from worker_daemon.runner import cuda_graph
from worker_daemon.runner.cuda_graph import GraphedProgram
from worker_daemon.runner.graph_recorder import GraphRecorder
from worker_daemon.runner.input_batch import InputBuilder, staging_capacity
from worker_daemon.runner.kv_cache import LayerKV
from worker_daemon.runner.parts.interface import PartContext, StepPart
from worker_daemon.runner.parts.random_sampling import RandomSamplingPart
from worker_daemon.runner.parts.step_parts import StepParts
from worker_daemon.runner.proposal_graphs import (
    DraftModelProposals,
    ProposalInputs,
    Proposals,
)
from worker_daemon.runner.request_state import RequestState
from worker_daemon.runner.row_tables import RowTables, TorchRowKernels
from worker_daemon.runner.scheduled_step import StepLimits
from worker_daemon.runner.shared_ladder import SharedLadder
from worker_daemon.runner.slot_bitmap import slot_bitmap
from worker_daemon.runner.stage_program import EagerProgram
from worker_daemon.runner.staging import HostStaging
from worker_daemon.runner.step_layout import (
    ExactShapes,
    ProposalLadder,
    StepLadder,
    decode_sizes,
    drafted_counts,
    largest_shape,
    mixed_plans,
    mixed_sizes,
    packed_size,
    proposal_sizes,
    split_columns,
)
from worker_daemon.runner.warmup import SyntheticStep, prefill_step, with_all_drafts
from worker_daemon.sample.sampler import TorchSampling

CPU = torch.device("cpu")
LIMITS = StepLimits(11, 200, 40, 64, 4, 200, max_samples_per_seq=3)
HIDDEN = 32
CONFIG = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "vocab_size": LIMITS.vocab_size,
    "hidden_size": HIDDEN,
    "intermediate_size": 48,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 64,
    "rms_norm_eps": 1e-5,
    "rope_theta": 1e4,
    "tie_word_embeddings": False,
    "torch_dtype": "float32",
}


class StaticStaging:
    """One buffer at a fixed address, as a device has it."""

    def __init__(self, capacity):
        self.values = torch.zeros(capacity, dtype=torch.int32)

    def open(self, shape):
        self.host = host = np.empty(packed_size(shape), np.int32)
        columns = split_columns(shape, lambda a, b: self.values[a:b])
        return SimpleNamespace(
            host=split_columns(shape, lambda a, b: host[a:b]),
            columns=columns,
            holds=None,
            delivery=None,
            take=self.take,
            taken=lambda: None,
        )

    def take(self):
        self.values[: self.host.size] = torch.from_numpy(self.host)

    def keep(self, shapes):
        list(shapes)


class Recorded:
    """A program that notes what it last ran."""

    def __init__(self, program):
        self.program, self.last = program, None

    def compile_subset(self):
        return self.program.compile_subset()

    def run(self, inputs, arrived):
        return self.program.run(inputs, arrived)

    def compute(self, inputs, arrived):
        output = self.program.compute(inputs, arrived)
        self.last = (inputs, arrived, output)
        return output


@pytest.fixture
def graphs(monkeypatch):
    """Makes torch.cuda's graphs run on the CPU; returns the programs that are captured."""
    programs = []

    class Graph:
        def capture_begin(self, **options):
            assert options["capture_error_mode"] == "thread_local"

        def capture_end(self):
            self.program, self.captured = programs[-1].program, programs[-1].last

        def replay(self):
            inputs, arrived, output = self.captured
            inputs.packed.take()
            again = self.program.compute(inputs, arrived)
            output.hidden.copy_(again.hidden)
            for kept, new in zip(output.chosen, again.chosen, strict=True):
                if kept is not None:
                    kept.copy_(new)

    for name, fake in {
        "CUDAGraph": Graph,
        "graph_pool_handle": lambda: (0, 0),
        "stream": lambda stream: nullcontext(),
        "synchronize": lambda: None,
    }.items():
        monkeypatch.setattr(cuda_graph.torch.cuda, name, fake)
    return programs


class Rank:
    """One stage with its own rows."""

    def __init__(self, config, layers, index, num_stages, graphs=None, parts=(), exchange=None):
        """parts: types of further ones. exchange: of experts, with other replicas."""
        self.exchange = exchange
        is_first, is_last = index == 0, index == num_stages - 1
        stage = build_stage(
            config, layers, is_first, is_last, SingleRank(), torch.float32, CPU, 64,
            TensorAttention(), TorchOps(), replica_experts=exchange,
        )  # fmt: skip
        for name, view in stage.checkpoint_views().items():
            generator = torch.Generator().manual_seed(sum(name.encode()))
            view.normal_(1.0 if "norm" in name else 0.0, 0.3, generator=generator)
        size = (LIMITS.num_blocks, 2, LIMITS.block_size)
        caches = [
            LayerKV(torch.zeros(*size, spec.num_kv_heads, spec.head_dim), 0)
            for spec in stage.kv_layer_specs
        ]
        self.stage = stage
        self.state = request_state(LIMITS)
        if parts:
            context = PartContext(LIMITS, CPU, is_first, is_last, TorchSampling())
            chooser = RandomSamplingPart(context)
            made = StepParts([*(p(context) for p in parts), chooser], chooser, context)
            self.state = RequestState(LIMITS, made)
        self.tables = RowTables(LIMITS, CPU, TorchRowKernels())
        staging = StaticStaging(staging_capacity(self.state))
        self.inputs = InputBuilder(self.state, self.tables, staging, ExactShapes())
        keeps = num_stages == 1
        self.program = EagerProgram(
            stage,
            self.tables,
            caches,
            self.state.parts,
            HostStaging() if keeps else None,
            stage.new_logits(largest_shape(LIMITS).num_samples) if is_last else None,
            shares_experts=exchange is not None,
        )
        if graphs is not None:
            self.capture(graphs, is_first)

    def capture(self, graphs, is_first):
        recorded = Recorded(self.program)
        graphs.append(recorded)
        mixed = mixed_plans(LIMITS.max_num_seqs, 64, 40, max_num_samples=LIMITS.max_num_samples)
        ladder = StepLadder(decode_sizes(LIMITS.max_num_seqs), lambda size: [12, 40], mixed)
        if self.exchange is not None:
            ladder = SharedLadder(ladder.plans, self.stage.most_graphed)
        arriving = 0 if is_first else max(plan.shape.num_tokens for plan in ladder.plans)
        arrived = torch.zeros(arriving, HIDDEN)
        self.program = GraphedProgram(recorded, arrived, GraphRecorder(None), self.exchange)
        plans = self.inputs.with_parts(ladder.plans)
        self.program.capture(plans, self.inputs.padding)
        self.inputs.pad_by(ladder, plans)

    @torch.inference_mode()
    def run(self, message, arrays, arrived):
        inputs = self.inputs.build(self.state.apply(message, arrays))
        output = self.program.run(inputs, arrived)
        return inputs, output.hidden[: inputs.num_tokens].clone(), output.chosen


def run_step(ranks, message, arrays):
    """The tokens that a pipeline samples, with their slots and positions."""
    hidden = torch.zeros(0, HIDDEN)
    for rank in ranks:
        inputs, hidden, chosen = rank.run(message, arrays, hidden)
    rows = inputs.sample_rows
    tokens = chosen.greedy[: rows.slots_np.size].clone()
    last = hidden[rows.token_indices[: rows.slots_np.size].long()]
    logits = ranks[-1].stage.gather_logits(chosen.logits[: rows.slots_np.size])
    torch.testing.assert_close(logits, ranks[-1].stage.compute_logits(last))
    for rank in ranks if rows.given else ranks[:-1]:
        rank.tables.last_sampled[rows.newest().slots.long()] = rows.newest_of(tokens)
    return [*zip(rows.slots_np.tolist(), rows.positions_np.tolist(), tokens.tolist(), strict=True)]


class RandomRequests:
    """Prompts that come, decode and go."""

    def __init__(self, rng):
        self.rng, self.rows, self.seq = rng, NaiveRows(LIMITS), 0
        self.free = list(range(1, LIMITS.num_blocks))

    def plan(self):
        rng, rows, plan = self.rng, self.rows, Plan()
        full = [s for s, r in rows.requests.items() if r.num_tokens >= LIMITS.max_model_len]
        plan.finished = [s for s in rows.requests if s in full or rng.random() < 0.04]
        for slot in plan.finished:
            self.free += rows.requests[slot].blocks
        live = {s: r for s, r in rows.requests.items() if s not in plan.finished}
        for slot in set(range(LIMITS.max_num_seqs)) - live.keys():
            if rng.random() < 0.12:
                tokens = rng.integers(0, 64, int(rng.integers(1, 14))).tolist()
                plan.admissions.append(Admission(slot, tokens, len(tokens), 0, SamplingParams()))
        plan.scheduled = {s: 1 for s in live if rng.random() < 0.9}
        plan.scheduled |= {new.slot: len(new.tokens) for new in plan.admissions}
        plan.several = {
            slot: int(rng.integers(1, min(count, LIMITS.max_samples_per_seq) + 1))
            for slot, count in plan.scheduled.items()
            if count > 1
        }
        for slot, count in sorted(plan.scheduled.items()):
            computed = live[slot].computed if slot in live else 0
            have = len(live[slot].blocks) if slot in live else 0
            need = -(-(computed + count) // LIMITS.block_size) - have
            plan.blocks += [(slot, self.free.pop(0)) for _ in range(need)]
        return plan

    def message(self):
        self.seq += 1
        plan = self.plan()
        message, arrays = encode(self.seq, plan, self.rows)
        self.rows.apply(self.seq, plan)
        return message, arrays


@pytest.mark.parametrize("num_stages", [1, pytest.param(2, marks=pytest.mark.exhaustive), 3])
def test_replayed_stages_sample_the_tokens_of_one_eager_stage(tmp_path, graphs, num_stages):
    (tmp_path / "config.json").write_text(json.dumps(CONFIG))
    config = read_model_config(tmp_path)
    whole = [Rank(config, range(3), 0, 1)]
    parts = partition_layers(3, num_stages, None)
    pipeline = [
        Rank(config, layers, index, num_stages, graphs) for index, layers in enumerate(parts)
    ]
    for program in (rank.program for rank in pipeline):
        program.run = counted(program.run, program)
    requests, seen = RandomRequests(np.random.default_rng()), set()
    for _ in range(70):
        message, arrays = requests.message()
        expected = run_step(whole, message, arrays)
        assert run_step(pipeline, message, arrays) == expected
        seen |= {token for *_, token in expected}
    replays = sum(rank.program.run.replays for rank in pipeline)
    assert replays > 40 * num_stages
    assert all(rank.program.run.mixed > 10 for rank in pipeline)
    outputs = [captured.output for captured in pipeline[-1].program._graphs.values()]
    assert len({output.chosen.logits.data_ptr() for output in outputs}) == 1 < len(outputs)
    assert len(seen) > 5


RAMP = torch.linspace(-1.0, 1.0, HIDDEN)


class Lean(Extension, frozen=True, tag=101, kw_only=True):
    """What a request has of a feature that acts around the forward pass."""

    amount: Count


class LeaningPart(StepPart):
    """Moves the residual stream of a request's tokens, and of its sampled ones on the way out."""

    request_extension = Lean
    columns = ("token", "sequence")
    in_forward = True

    def __init__(self, context):
        self.amounts = np.zeros(context.num_rows, np.int32)
        self.context = context

    def admit(self, requests, extensions):
        for request, lean in zip(requests, extensions, strict=True):
            self.amounts[request.slot] = 0 if lean is None else lean.amount

    def fill(self, columns, step, step_values):
        assert step_values is None
        assert all(not column.any() for column in columns)
        amounts = self.amounts[step.slots]
        columns[0][: step.total_num_tokens] = np.repeat(amounts, step.num_tokens)
        columns[1][: amounts.size] = amounts

    def before_forward(self, hidden, columns):
        tokens, _ = columns
        return hidden + 0.4 * tokens.unsqueeze(1) * RAMP if self.context.is_first_stage else hidden

    def after_forward(self, hidden, columns):
        _, sequences = columns
        return hidden + 0.1 * sequences.sum() * RAMP if self.context.is_last_stage else hidden


class IdlePart(StepPart):
    """Has graphs like the other part, but no step uses it."""

    in_forward = True


@pytest.mark.parametrize("num_stages", [1, 2])
def test_steps_with_a_part_around_the_forward_pass_have_graphs_of_their_own(
    tmp_path, graphs, num_stages
):
    (tmp_path / "config.json").write_text(json.dumps(CONFIG))
    config = read_model_config(tmp_path)
    kinds = (LeaningPart, IdlePart)
    whole = [Rank(config, range(3), 0, 1, parts=kinds)]
    plain = [Rank(config, range(3), 0, 1)]
    layers = partition_layers(3, num_stages, None)
    pipeline = [
        Rank(config, own, index, num_stages, graphs, kinds) for index, own in enumerate(layers)
    ]
    keys = set()
    for rank in pipeline:
        run = rank.program.run
        rank.program.run = lambda inputs, arrived, run=run, program=rank.program: (
            keys.add((inputs.plan.parts, inputs.plan in program._graphs)),
            run(inputs, arrived),
        )[1]
    rng = np.random.default_rng()
    requests, num_other = RandomRequests(rng), 0
    for step in range(70):
        message, arrays = requests.message()
        unmoved = message
        is_due = num_other <= 5 or rng.random() < 0.4  # some are there, whatever is drawn
        if step > 20 and message.scheduled_new_reqs and is_due:
            first, *rest = message.scheduled_new_reqs
            lean = Lean(amount=int(rng.integers(1, 4)))
            moved = msgspec.structs.replace(first, extensions=(lean,))
            message = msgspec.structs.replace(message, scheduled_new_reqs=(moved, *rest))
        expected = run_step(whole, message, arrays)
        assert run_step(pipeline, message, arrays) == expected
        num_other += run_step(plain, unmoved, arrays) != expected
    assert num_other > 2
    assert (0, True) in keys
    assert {parts for parts, is_graph in keys if is_graph and parts}
    assert {parts for parts, _ in keys} <= {0, 2}


@pytest.mark.parametrize("extensions", [(), (Lean(amount=2),)], ids=["plain", "leaning"])
def test_steps_with_drafts_have_graphs_with_and_without_a_part(extensions):
    limits = StepLimits(8, 64, 40, 64, 4, 200, max_drafts=3)
    context = PartContext(limits, CPU, True, True, TorchSampling())
    chooser = RandomSamplingPart(context)
    parts = StepParts([LeaningPart(context), IdlePart(context), chooser], chooser, context)
    state = RequestState(limits, parts)
    inputs = InputBuilder(
        state,
        RowTables(limits, CPU, TorchRowKernels()),
        StaticStaging(staging_capacity(state)),
        ExactShapes(),
    )
    counts = drafted_counts(limits.max_drafts)
    ladder = StepLadder(
        decode_sizes(8),
        lambda size: [12, 40],
        mixed_plans(8, 64, 40, max_num_samples=limits.max_num_samples),
        drafts=counts,
        max_num_tokens=64,
    )
    plans = inputs.with_parts(ladder.plans)
    assert len(set(plans)) == len(plans)
    inputs.pad_by(ladder, plans)

    def plan_of(step):
        return inputs.build(state.apply(step.message, step.arrays)).plan

    seqs = (SimpleNamespace(epoch=1, link=1, seq=seq) for seq in itertools.count(1))
    found = [plan_of(prefill_step(next(seqs), limits, [5, 2, 7], extensions))]
    found += [
        plan_of(SyntheticStep(drafting_step(next(seqs), 3, count), ())) for count in (1, 3, 2, 0)
    ]
    admitting = with_all_drafts(prefill_step(next(seqs), limits, [4, 4], extensions), limits)
    found.append(plan_of(admitting))
    for plan in found:
        assert plan in plans
        assert bool(plan.parts) == bool(extensions)
    assert [plan.max_query_len for plan in found[1:4]] == [2, 4, 3]
    assert all(plan.shape.num_corrected for plan in found[1:])


def drafting_step(request, num_seqs, num_drafts):
    """A step in which each of the first rows has so many drafts, and gets a block."""
    slots = np.arange(num_seqs)
    pairs, tokens = (
        np.stack([slots, np.full_like(slots, count)], axis=1).astype("<i4").tobytes()
        for count in (num_drafts, 1 + num_drafts)
    )
    return ExecuteModel(
        **vars(request),
        total_num_scheduled_tokens=num_seqs * (1 + num_drafts),
        scheduled=slot_bitmap(slots),
        num_scheduled_tokens=tokens,
        num_drafts=pairs if num_drafts else b"",
        draft_token_ids=np.zeros(num_seqs * num_drafts, "<i4").tobytes(),
        new_block_slots=slots.astype("<u2").tobytes(),
        new_block_ids=(100 + request.seq * num_seqs + slots).astype("<i4").tobytes(),
    )


def counted(run, program):
    """Count the steps that find a graph."""

    def call(inputs, arrived):
        call.replays += inputs.plan in program._graphs
        call.mixed += inputs.plan in program._graphs and inputs.plan.max_query_len > 1
        return run(inputs, arrived)

    call.replays = call.mixed = 0
    return call


def test_a_failed_capture_leaves_the_program_and_its_shapes_as_they_were(tmp_path, graphs):
    (tmp_path / "config.json").write_text(json.dumps(CONFIG))
    rank = Rank(read_model_config(tmp_path), range(3), 0, 1)
    eager = rank.program
    graphed = GraphedProgram(Failing(), torch.zeros(0, HIDDEN), GraphRecorder(None))
    ladder = StepLadder([4], lambda size: [40], [])
    with pytest.raises(torch.OutOfMemoryError):
        graphed.capture(ladder.plans, rank.inputs.padding)
    assert rank.program is eager
    requests = RandomRequests(np.random.default_rng(1))
    message, arrays = requests.message()
    inputs = rank.inputs.build(rank.state.apply(message, arrays))
    assert inputs.plan.shape.num_tokens == inputs.num_tokens


class Failing:
    def compile_subset(self):
        return self

    def run(self, inputs, arrived):
        raise torch.OutOfMemoryError("no room")


class Account:
    """What graphs have of a device: a pool as large as the largest needs, and each its own."""

    def __init__(self):
        self.pool = self.own = self.num_graphs = 0

    def graph(account):
        class Graph:
            def capture_begin(self, **options):
                pass

            def capture_end(self):
                account.num_graphs += 1
                account.pool = max(account.pool, account.tokens * 1000)
                self.own = 5000 + account.tokens * 10
                account.own += self.own

            def replay(self):
                pass

            def __del__(self):
                account.num_graphs -= 1
                account.own -= self.own
                if not account.num_graphs:
                    account.pool = 0

        return Graph()

    def used_bytes(self):
        return 777 + self.pool + self.own

    def compile_subset(self):
        return self

    def run(self, inputs, arrived):
        self.tokens = inputs.plan.shape.num_tokens
        return SimpleNamespace(chosen=())

    compute = run


class Follower:
    """A draft model that an account pays for."""

    replay = None

    def __init__(self, account):
        self.account = account

    def compile_subset(self):
        return self

    def compute(self, gained):
        self.account.tokens = gained.rows.shape[0]
        return torch.zeros(gained.rows.shape[0], 2, dtype=torch.int64)

    def propose_by(self, replay):
        self.replay = replay


def proposals_of(follower, max_num_seqs):
    sizes = proposal_sizes(max_num_seqs)
    inputs = ProposalInputs(sizes[-1], 2, None, CPU)
    return DraftModelProposals(follower, ProposalLadder(sizes, lambda size: [200, 400]), inputs)


class NoColumns:
    def take(self):
        return None

    taken = take


@pytest.mark.parametrize(("max_num_seqs", "max_tokens"), [(256, 8192), (64, 100), (8, 8), (1, 1)])
@pytest.mark.parametrize("arriving", [0, 40])
@pytest.mark.parametrize("has_draft_model", [False, True])
def test_estimate_is_what_all_graphs_take_and_leaves_none(
    graphs, monkeypatch, max_num_seqs, max_tokens, arriving, has_draft_model
):
    account = Account()
    monkeypatch.setattr(cuda_graph.torch.cuda, "CUDAGraph", account.graph)
    mixed = mixed_plans(max_num_seqs, max_tokens, 400, sizes=mixed_sizes(1))
    ladder = StepLadder(decode_sizes(max_num_seqs), lambda size: [200, 400], mixed)
    inputs = SimpleNamespace(
        padding=lambda plan: SimpleNamespace(plan=plan, packed=NoColumns()),
        pad_by=lambda ladder, plans: None,
        with_parts=lambda plans: plans,
    )
    programs = []
    runner = SimpleNamespace(inputs=inputs, use=programs.append)
    buffer = torch.zeros(arriving, HIDDEN)
    follower = Follower(account)
    proposals = proposals_of(follower, max_num_seqs) if has_draft_model else Proposals()
    made = cuda_graph.LadderGraphs(
        ladder, account, buffer, None, holds_communication=False, proposals=proposals
    )
    num_plans = len(ladder.plans) + len(proposals.plans)

    captured = []
    used = account.used_bytes

    def used_bytes():
        captured.append(account.num_graphs)
        return used()

    estimate = made.estimate_bytes(runner, used_bytes)
    assert (made.count, account.num_graphs, programs) == (0, 0, [])
    assert follower.replay is None
    assert max(captured) <= 4 + num_plans // 4
    before = used()
    made.capture(runner)
    assert made.count == account.num_graphs == num_plans
    actual = used() - before + buffer.nbytes + proposals.num_bytes
    assert estimate == pytest.approx(actual, rel=0.1)


class TracedRunner:
    """The program and padding given to a runner."""

    def __init__(self):
        self.program = self.ladder = None
        self.inputs = SimpleNamespace(
            padding=lambda plan: SimpleNamespace(plan=plan, packed=NoColumns()),
            pad_by=lambda ladder, plans: setattr(self, "ladder", ladder),
            with_parts=lambda plans: plans,
        )

    def use(self, program):
        self.program = program


@pytest.mark.parametrize("holds_communication", [False, True])
def test_graphs_set_aside_for_a_new_rank_s_warm_up(graphs, monkeypatch, holds_communication):
    account = Account()
    monkeypatch.setattr(cuda_graph.torch.cuda, "CUDAGraph", account.graph)
    monkeypatch.setattr(cuda_graph.torch.cuda, "empty_cache", lambda: None)
    ladder, follower = StepLadder(decode_sizes(8), lambda size: [40], []), Follower(account)
    made = cuda_graph.LadderGraphs(
        ladder,
        account,
        torch.zeros(0, HIDDEN),
        None,
        holds_communication=holds_communication,
        proposals=proposals_of(follower, 8),
    )
    runner = TracedRunner()
    made.capture(runner)
    first, num_graphs = runner.program, account.num_graphs
    drafting = follower.replay
    assert drafting is not None
    assert num_graphs == made.count > 0 and runner.ladder is ladder
    made.before_relink(runner)
    kept = 0 if holds_communication else num_graphs
    assert made.count == kept
    made.set_aside(runner)
    assert runner.program is account and type(runner.ladder) is ExactShapes
    assert follower.replay is None
    made.restore(runner)
    assert (made.count, runner.ladder) == (num_graphs, ladder)
    assert (runner.program is first) == (not holds_communication)
    assert (follower.replay is drafting) == (not holds_communication)
    assert follower.replay is not None
    del first, drafting
    assert account.num_graphs == num_graphs

"""Graphs of replicas that share experts, with the fake graphs of test_cuda_graph: the tokens and
the experts' loads are those of replicas by themselves, whatever each of them has to compute."""

import json
import threading
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace

import numpy as np
import pytest
import torch
from row_steps import Plan, encode
from test_cuda_graph import CONFIG, CPU, HIDDEN, LIMITS, RandomRequests, Rank, graphs

from tests.support.waiting import PATIENCE_S
from worker_daemon.contracts.experts import RoutedTokens
from worker_daemon.contracts.window import Window
from worker_daemon.distributed import ep
from worker_daemon.distributed.ep import ReplicaExperts
from worker_daemon.distributed.parallel_state import ParallelState
from worker_daemon.distributed.symmetric import BLANK, Peers
from worker_daemon.models.config import read_model_config
from worker_daemon.runner.scheduled_step import TokensOfReplicas
from worker_daemon.runner.shared_ladder import SharedLadder
from worker_daemon.runner.step_layout import StepLadder, drafted_counts, mixed_plans

__all__ = ["graphs"]
FIELDS = {
    **CONFIG,
    "architectures": ["Qwen3MoeForCausalLM"],
    "moe_intermediate_size": 24,
    "num_experts": 7,
    "num_experts_per_tok": 2,
    "norm_topk_prob": True,
    "head_dim": 8,
}
LAYERS = range(FIELDS["num_hidden_layers"])
STEPS = 60
MOST_ROWS = LIMITS.max_num_batched_tokens
"""Rows of the windows. Larger steps would take a library, of which there is none."""


class Meeting:
    """Where replicas, each on a thread, leave their tensors for the others."""

    def __init__(self, size):
        self.size, self.left = size, {}
        self.barrier = threading.Barrier(size, timeout=PATIENCE_S)
        self.is_open = False

    def all(self, rank, *own):
        """Every rank's tensors; copies of this rank's own in place of all, while it is closed."""
        if not self.is_open:
            return [own] * self.size
        self.left[rank] = own
        self.barrier.wait()
        everyone = [self.left[rank] for rank in range(self.size)]
        self.barrier.wait()
        return everyone


class ThreadWindows:
    """Exchanges rows between threads."""

    def __init__(self, meeting, rank):
        self.meeting, self.rank = meeting, rank

    def most_rows(self, hidden_size, top_k, dtype):
        return MOST_ROWS

    def gather(self, x, routed, num_rows):
        missing = (0, 0, 0, num_rows - x.shape[0])
        pad = torch.nn.functional.pad
        own = pad(x, missing), pad(routed.experts, missing, value=-1), pad(routed.weights, missing)
        tokens, experts, weights = map(
            torch.cat, zip(*self.meeting.all(self.rank, *own), strict=True)
        )
        return tokens, RoutedTokens(experts, weights)

    def sum_rows(self, total):
        parts = [own[0] for own in self.meeting.all(self.rank, total.clone())]
        return sum(parts).chunk(self.meeting.size)[self.rank]


class Requests(RandomRequests):
    """Also steps without any."""

    def plan(self):
        plan = Plan() if self.rng.random() < 0.3 else super().plan()
        plan.several = {}
        return plan

    def step(self):
        self.seq += 1
        plan = self.plan()
        message, arrays = encode(self.seq, plan, self.rows)
        ran = self.rows.apply(self.seq, plan)
        return message, arrays, len(ran)


def sampled(rank, inputs, output):
    """The tokens that a step has sampled, by slot."""
    rows = inputs.sample_rows
    tokens = output.chosen.greedy[: rows.slots_np.size].tolist()
    return dict(zip(rows.slots_np.tolist(), tokens, strict=True))


@torch.inference_mode()
def run(rank, message, arrays, tokens):
    step = rank.state.apply(message, arrays)
    if rank.exchange is not None:
        size = rank.inputs.size_of_all(tokens)
        step = step._replace(shared_size=size)
        rank.exchange.begin(size)
    inputs = rank.inputs.build(step)
    output = rank.program.run(inputs, torch.zeros(0, HIDDEN))
    if rank.exchange is not None:
        assert not rank.exchange.is_open, "all exchanges of the step were made"
        assert not rank.exchange.is_torn
    return inputs.plan, sampled(rank, inputs, output)


@pytest.mark.parametrize("size", [2, pytest.param(3, marks=pytest.mark.exhaustive)])
def test_replicas_that_replay_sample_the_tokens_of_replicas_by_themselves(
    tmp_path, graphs, monkeypatch, size
):
    monkeypatch.setattr(ep, "_exchanges", lambda exchange, window: True)
    monkeypatch.setattr(ep, "smallest", lambda value, device, group, choice: value)
    (tmp_path / "config.json").write_text(json.dumps(FIELDS))
    config = read_model_config(tmp_path)
    meeting, replicas = Meeting(size), []
    for place in range(size):
        state = ParallelState(1, 1, place, size, lockstep=True)
        exchange = ReplicaExperts(state, lambda window: ThreadWindows(meeting, window.rank))
        peers = Peers()
        peers.window = Window(place, CPU, range(size), 0, BLANK, 0)
        exchange.bind(object(), peers)
        shared = replace(config, expert_parallel=True)
        replicas.append(Rank(shared, LAYERS, 0, 1, graphs, exchange=exchange))
    meeting.is_open = True
    alone = [Rank(config, LAYERS, 0, 1) for _ in range(size)]
    for rank in (*replicas, *alone):
        rank.stage.allocate_routing(CPU)
    seed = int(np.random.default_rng().integers(1 << 30))
    print(f"seed {seed}")
    requests = [Requests(np.random.default_rng([seed, place])) for place in range(size)]
    replayed, seen = [0] * size, set()
    with ThreadPoolExecutor(size) as threads:
        for _ in range(STEPS):
            steps = [own.step() for own in requests]
            counts = tuple(message.total_num_scheduled_tokens for message, *_ in steps)
            are_decodes = counts == tuple(num_seqs for *_, num_seqs in steps)
            tokens = TokensOfReplicas(counts, are_decodes)
            expected = [
                run(rank, message, arrays, tokens)[1]
                for rank, (message, arrays, _) in zip(alone, steps, strict=True)
            ]
            results = [
                threads.submit(run, rank, message, arrays, tokens)
                for rank, (message, arrays, _) in zip(replicas, steps, strict=True)
            ]
            for place, result in enumerate(results):
                plan, found = result.result(PATIENCE_S)
                assert found == expected[place], f"seed {seed}"
                is_padded = plan.shape.num_tokens > counts[place]
                replayed[place] += plan in replicas[place].program._graphs
                seen.add((counts[place] > 0, is_padded, are_decodes))
    assert min(replayed) > STEPS // 3
    assert {(False, True, True), (False, True, False), (True, True, False)} <= seen
    loads = [sum(read_loads(rank) for rank in ranks) for ranks in (replicas, alone)]
    assert torch.equal(*loads)


def read_loads(rank):
    """The tokens that each expert of each layer has got."""
    rank.stage.expert_loads.start_reading()()
    by_layer = rank.stage.expert_loads.known.get()
    return torch.tensor([np.frombuffer(own, "<i8").tolist() for own in by_layer.values()])


@pytest.mark.parametrize("num_drafts", [0, 3])
def test_all_replicas_find_the_size_of_a_step_in_its_counts(num_drafts):
    """With drafts, decodes share the sizes of other steps: some replica may have some."""
    mixed = mixed_plans(11, 64, 40)
    drafts = drafted_counts(num_drafts)
    ladder = StepLadder(
        [1, 2, 4, 8, 16], lambda size: [40], mixed, drafts=drafts, max_num_tokens=64
    )
    shared = SharedLadder(ladder.plans, most_tokens=32)
    assert {plan.shape.num_tokens for plan in shared.plans if plan.max_query_len == 1} == (
        {16} if num_drafts else {1, 2, 4, 8, 16}
    )
    for are_decodes, most, size in [
        (True, 0, 0),
        (True, 3, 16 if num_drafts else 4),
        (True, 16, 16),
        (True, 17, 32),
        (False, 3, 16),
        (False, 33, 33),
    ]:
        for counts in [(most, 0), (0, most), (most, most)]:
            assert shared.size_of_all(TokensOfReplicas(counts, are_decodes)) == size

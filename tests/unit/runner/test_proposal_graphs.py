"""Graphs of a draft model's passes, with fake graphs that run again on what the buffers now have:
padding and sampling for all options must not change drafts, nor keys and values."""

import json
import random

import numpy as np
import pytest
import torch
from row_steps import request_state
from tensor_attention import TensorAttention

from rpc_schema.config import SpeculativeConfig
from rpc_schema.sampling import RandomSampling
from rpc_schema.step import NO_TOKEN, NewRequestData
from worker_daemon.distributed.tp import SingleRank
from worker_daemon.drafting.interface import Gained, RowEnds
from worker_daemon.drafting.model import ModelDrafter
from worker_daemon.drafting.registry import make_drafter
from worker_daemon.drafting.row_texts import DraftLimits, RowTexts
from worker_daemon.drafting.torch_text import TorchTextKernels
from worker_daemon.layers.torch_ops import TorchOps
from worker_daemon.models.config import read_model_config
from worker_daemon.models.decoder import build_stage
from worker_daemon.runner.graph_recorder import RecordedGraph
from worker_daemon.runner.input_batch import InputBuilder
from worker_daemon.runner.kv_cache import LayerKV
from worker_daemon.runner.proposal_graphs import DraftModelProposals, ProposalInputs
from worker_daemon.runner.row_tables import RowTables, TorchRowKernels
from worker_daemon.runner.sample_rows import SampleRows
from worker_daemon.runner.scheduled_step import StepLimits
from worker_daemon.runner.stage_program import EagerProgram
from worker_daemon.runner.staging import HostStaging
from worker_daemon.runner.step_layout import ExactShapes, ProposalLadder, proposal_sizes

CPU = torch.device("cpu")
ROWS, LONGEST, VOCAB, BLOCK, DRAFTS = 11, 40, 64, 4, 3
BLOCKS_OF_ROW = LONGEST // BLOCK
SEED = random.randrange(1 << 20)
CONFIG = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "vocab_size": VOCAB,
    "hidden_size": 32,
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


class FakeGraph:
    def __init__(self, launch, output):
        self.launch, self.output, self.num_replays = launch, output, 0

    def replay(self):
        self.num_replays += 1
        self.output.copy_(self.launch())


class FakeRecorder:
    def __init__(self):
        self.graphs = []

    def record(self, launch, error_mode="thread_local"):
        output = launch()
        self.graphs.append(FakeGraph(launch, output))
        return RecordedGraph(self.graphs[-1], output)

    @property
    def num_replays(self):
        return sum(graph.num_replays for graph in self.graphs)


class Sides:
    """A draft model that launches its kernels and one with graphs, over caches with the same
    content, and the rows that both draft for."""

    def __init__(self, directory, ladder):
        print(f"seed {SEED}")
        self.rng = np.random.default_rng(SEED)
        torch.manual_seed(SEED)
        (directory / "config.json").write_text(json.dumps(CONFIG))
        config = read_model_config(directory)
        stage = build_stage(
            config, range(3), True, True, SingleRank(), torch.float32, CPU, 64,
            TensorAttention(), TorchOps(),
        )  # fmt: skip
        for name, view in stage.checkpoint_views().items():
            view.normal_(1.0 if "norm" in name else 0.0, 0.3)
        num_blocks = 1 + ROWS * BLOCKS_OF_ROW
        self.pages = [torch.randn(num_blocks, 2, BLOCK, 2, 8) for _ in range(3)]
        self.graphed_pages = [page.clone() for page in self.pages]
        own = 1 + torch.randperm(num_blocks - 1).view(ROWS, BLOCKS_OF_ROW)
        self.table = torch.cat((own, torch.zeros(1, BLOCKS_OF_ROW, dtype=torch.int64))).int()
        self.limits = DraftLimits(ROWS, LONGEST, DRAFTS)
        self.eager, self.graphed = (
            ModelDrafter(
                stage,
                pages,
                self.table,
                BLOCK,
                self.limits,
                RowTexts(self.limits, CPU, TorchTextKernels()),
            )
            for pages in (self.pages, self.graphed_pages)
        )
        limits = StepLimits(ROWS, 64, LONGEST, VOCAB, BLOCK, num_blocks, max_drafts=DRAFTS)
        self.parts = request_state(limits).parts
        self.chooser = self.parts.chooser
        self.tables = RowTables(limits, CPU, TorchRowKernels())
        self.admit()
        self.recorder = FakeRecorder()
        self.proposals = DraftModelProposals(
            self.graphed, ladder, ProposalInputs(ROWS, DRAFTS, self.chooser, CPU)
        )

    def admit(self):
        """Give some rows each way of sampling."""
        kinds = [
            None,
            RandomSampling(temperature=0.9, seed=3),
            RandomSampling(temperature=1.4, top_k=4, seed=4),
            RandomSampling(temperature=2.0, top_p=0.7, min_p=0.1, seed=2**63 + 5),
        ]
        drawn = [kinds[slot % len(kinds)] for slot in range(ROWS)]
        requests = [
            NewRequestData(
                slot=slot,
                req_id=str(slot),
                num_tokens=1,
                num_prompt_tokens=1,
                num_computed_tokens=0,
            )
            for slot in range(ROWS)
        ]
        self.chooser.admit(requests, drawn)

    def gained(self):
        """What random rows gain, in a step with or without drafts; some of them nothing."""
        rng, count = self.rng, int(self.rng.integers(1, ROWS + 1))
        columns = int(rng.choice([1, 1 + DRAFTS]))
        slots = np.sort(rng.permutation(ROWS)[:count])
        rows = torch.from_numpy(slots.astype(np.int32))
        counts = torch.from_numpy(rng.integers(0, 1 + columns, count, dtype=np.int32))
        token_ids = torch.from_numpy(rng.integers(0, VOCAB, (count, columns)))
        is_gained = torch.arange(columns) < counts.unsqueeze(1)
        token_ids = torch.where(is_gained, token_ids, NO_TOKEN)
        most = int(rng.choice([3, 10, LONGEST]))
        positions = torch.from_numpy(rng.integers(0, most, count, dtype=np.int32))
        longest = min(LONGEST - 1, int(positions.max()) + int(rng.integers(0, 4)))
        none = rows[:0]
        sampled = SampleRows(slots, slots, slots, 0, rows, none, positions, None)

        def choose(logits, at):
            return self.chooser.choose(logits, sampled._replace(positions=at))

        return Gained(rows, token_ids, counts, positions + 1, RowEnds(longest, choose))

    def assert_equal_drafts(self, gained):
        expected, found = self.eager.propose(gained), self.graphed.propose(gained)
        has_some = gained.counts > 0
        assert found.shape == expected.shape
        assert torch.equal(found[has_some], expected[has_some])
        for ours, theirs in zip(self.graphed_pages, self.pages, strict=True):
            # Padded rows change the order of sums. Those of other tokens differ by about 1.
            torch.testing.assert_close(ours[1:], theirs[1:], rtol=1e-3, atol=1e-4)


def test_replayed_drafts_are_those_of_eager_passes(tmp_path):
    ladder = ProposalLadder(proposal_sizes(ROWS), lambda size: [12, LONGEST])
    sides = Sides(tmp_path, ladder)
    before = [page.clone() for page in sides.graphed_pages]
    proposals, recorder = sides.proposals, sides.recorder
    for _ in range(2):  # again with a new link, when the buffers have the rows of the last step
        proposals.use(proposals.capture(recorder, proposals.plans))
        for ours, was in zip(sides.graphed_pages, before, strict=True):
            assert torch.equal(ours[1:], was[1:]), "a capture has touched a request's blocks"
        captured, drafts = recorder.num_replays, set()
        for _ in range(12):
            gained = sides.gained()
            sides.assert_equal_drafts(gained)
            drafts |= set(sides.graphed.propose(gained)[gained.counts > 0].flatten().tolist())
        assert recorder.num_replays == captured + 24
        assert len(drafts) > 5
        before = [page.clone() for page in sides.graphed_pages]
    proposals.use(None)
    sides.assert_equal_drafts(sides.gained())
    assert recorder.num_replays == captured + 24


def test_rows_beyond_the_ladder_are_launched_eagerly(tmp_path):
    sides = Sides(tmp_path, ProposalLadder([1, 4], lambda size: [LONGEST - 9]))
    sides.proposals.use(sides.proposals.capture(sides.recorder, sides.proposals.plans))
    captured, num_fitting = sides.recorder.num_replays, 0
    for _ in range(30):
        gained = sides.gained()
        sides.assert_equal_drafts(gained)
        num_fitting += gained.rows.shape[0] <= 4 and gained.ends.longest < LONGEST - 9
    assert sides.recorder.num_replays == captured + num_fitting
    assert 0 < num_fitting < 30


@torch.inference_mode()
@pytest.mark.parametrize("counts", [[2, 3], [1, 1]])
def test_kernels_of_the_draft_model_are_launched_ahead(tmp_path, counts):
    """Through two of its layers, beside two of the target's, also those of decodes, which only
    drafts launch; and those of every graph."""
    ladder = ProposalLadder(proposal_sizes(ROWS), lambda size: [12, LONGEST])
    sides = Sides(tmp_path, ladder)
    drafter, pages = sides.graphed, sides.graphed_pages
    own = [LayerKV(page, 0) for page in sides.pages]
    program = EagerProgram(drafter.stage, sides.tables, own, sides.parts, None, None, drafter)
    before = [page.clone() for page in (*sides.pages, *pages)]
    lengths, counts = np.array([2, 3], np.int32), np.array(counts, np.int32)
    program.compile_subset().launch_layers(torch.randn(sum(counts), 32), counts, lengths)
    changed = [not torch.equal(*pair) for pair in zip((*sides.pages, *pages), before, strict=True)]
    assert changed == [True, True, False] * 2
    before = pages[2].clone()
    sides.proposals.launch(sides.recorder)
    assert len(sides.recorder.graphs) == len(ladder.plans)
    assert sides.recorder.num_replays == 0
    assert torch.equal(pages[2], before)


@pytest.mark.parametrize("method", ["ngram", "suffix"])
def test_kernels_of_other_drafters_are_launched_ahead(method):
    """For gains of steps with drafts and without; nothing is left of the rows."""
    limits = StepLimits(ROWS, 64, LONGEST, VOCAB, BLOCK, 200, max_drafts=DRAFTS)
    state, tables = request_state(limits), RowTables(limits, CPU, TorchRowKernels())
    config = SpeculativeConfig(method=method, num_speculative_tokens=DRAFTS)
    kernels = NotedKernels()
    drafter = make_drafter(config, ROWS, LONGEST, CPU, kernels)
    inputs = InputBuilder(state, tables, HostStaging(), ExactShapes(), drafter)
    inputs.launch_drafting()
    search = {"ngram": "continue_texts", "suffix": "vote"}[method]
    assert kernels.launched >= {("append", 1), ("append", 1 + DRAFTS), ("place", None)}
    assert (search, None) in kernels.launched
    assert (("keep", None) in kernels.launched) == (method == "suffix")
    fresh = make_drafter(config, ROWS, LONGEST, CPU, TorchTextKernels())
    rows = torch.tensor([0, ROWS], dtype=torch.int32)
    tokens = torch.tensor([[1], [2]])
    gained = Gained(rows, tokens, torch.ones_like(rows), torch.ones_like(rows))
    assert torch.equal(drafter.propose(gained), fresh.propose(gained))


class NotedKernels(TorchTextKernels):
    """Notes which kernels are launched, and for gains of how many columns."""

    def __init__(self):
        self.launched = set()

    def __getattribute__(self, name):
        found = super().__getattribute__(name)
        if name not in ("place", "append", "continue_texts", "keep", "vote"):
            return found

        def launch(*args):
            columns = args[2].shape[1] if name == "append" else None
            self.launched.add((name, columns))
            return found(*args)

        return launch


@pytest.mark.parametrize("max_num_seqs", [1, 2, 7, 8, 130, 512, 700])
def test_every_proposal_of_up_to_512_rows_has_a_plan(max_num_seqs):
    ladder = ProposalLadder(proposal_sizes(max_num_seqs), lambda size: [64, 256, 1000])
    plans = ladder.plans
    assert plans == sorted(set(plans), reverse=True)
    assert max(plan.num_seqs for plan in plans) == min(max_num_seqs, 512)
    for count in range(1, max_num_seqs + 1):
        for longest in (0, 63, 64, 255, 256, 999):
            plan = ladder.fit(count, longest)
            if count > 512:
                assert plan is None
                continue
            assert plan in plans
            assert count <= plan.num_seqs <= max(8, 2 * count)
            assert longest < plan.max_seq_len
            smaller = [p for p in plans if p.num_seqs >= count and p.max_seq_len > longest]
            assert plan == min(smaller)

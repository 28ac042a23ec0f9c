"""The programs of steps with drafts, up to the drafts of the next step, make only calls that a CUDA
graph can hold; conftest.py runs it. No kernel runs, and no tensor has memory, so that a call that
needs a value fails."""

from collections import Counter
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from rpc_schema.config import SpeculativeConfig
from tests.unit.kernels.interpreted_launches import H100
from worker_daemon.contracts.drafting import TextKernels
from worker_daemon.distributed.tp import SingleRank
from worker_daemon.drafting.registry import make_drafter
from worker_daemon.drafting.torch_text import TorchTextKernels
from worker_daemon.kernels import compile_ahead
from worker_daemon.kernels.ops import TritonOps
from worker_daemon.kernels.paged_attention import TritonAttention
from worker_daemon.kernels.row_ops import TritonRowKernels
from worker_daemon.kernels.text_lookup import TritonTextKernels
from worker_daemon.kernels.tiles import DeviceLimits
from worker_daemon.layers.cache_spec import KVLayerSpec
from worker_daemon.models.config import parse_model_config
from worker_daemon.models.decoder import build_stage
from worker_daemon.runner.draft_verifier import DraftVerifier
from worker_daemon.runner.input_batch import InputBuilder, staging_capacity
from worker_daemon.runner.kv_cache import LayerKV
from worker_daemon.runner.parts.interface import PartContext
from worker_daemon.runner.parts.random_sampling import RandomSamplingPart
from worker_daemon.runner.parts.step_parts import StepParts
from worker_daemon.runner.request_state import RequestState
from worker_daemon.runner.row_tables import RowTables
from worker_daemon.runner.scheduled_step import StepLimits
from worker_daemon.runner.stage_program import EagerProgram
from worker_daemon.runner.staging import CudaStaging
from worker_daemon.runner.step_layout import (
    ExactShapes,
    StepLadder,
    decode_sizes,
    drafted_counts,
    largest_shape,
    mixed_plans,
)
from worker_daemon.sample.sampler import TorchSampling

META = torch.device("meta")
LIMITS = StepLimits(9, 64, 48, 64, 16, 40, max_drafts=4, makes_drafts=True)
CONFIG = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "vocab_size": LIMITS.vocab_size,
    "hidden_size": 64,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "max_position_embeddings": 64,
    "rms_norm_eps": 1e-5,
    "rope_theta": 1e4,
    "torch_dtype": "bfloat16",
}


class OnDeviceOnly(TorchDispatchMode):
    """Fails on a call with a tensor of the host: a copy from or to it."""

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        result = func(*args, **(kwargs or {}))
        given = [*args, *(kwargs or {}).values(), result]
        for value in given:
            for each in value if isinstance(value, list | tuple) else [value]:
                if isinstance(each, torch.Tensor):
                    assert each.device == META, f"{func} uses a tensor on {each.device}"
        return result


@pytest.fixture
def launches(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[str]]:
    """The names of the kernels that are launched, of which none runs."""
    made: list[str] = []

    def launcher(kernel: Any) -> Callable[..., None]:
        return lambda *args, **options: made.append(kernel.__name__)

    monkeypatch.setattr(
        compile_ahead.Launched, "__getitem__", lambda self, grid: launcher(self.kernel)
    )
    monkeypatch.setattr(DeviceLimits, "of", classmethod(lambda cls, device: H100))
    return made


class Program:
    """The program of a sole stage, and what builds its inputs."""

    def __init__(self, method: str, texts: TextKernels) -> None:
        config = SpeculativeConfig(method=method, num_speculative_tokens=4, max_kept_tokens=1024)
        context = PartContext(LIMITS, META, True, True, TorchSampling())
        chooser = RandomSamplingPart(context)
        state = RequestState(LIMITS, StepParts([chooser], chooser, context))
        tables = RowTables(LIMITS, META, TritonRowKernels())
        most = largest_shape(LIMITS).num_samples
        staging = CudaStaging(META, staging_capacity(state), most, 3, delivers=True)
        drafter = make_drafter(config, LIMITS.max_num_seqs, LIMITS.max_model_len, META, texts)
        self.inputs = InputBuilder(state, tables, staging, ExactShapes(), drafter)
        stage = build_stage(
            parse_model_config(CONFIG), range(2), True, True, SingleRank(), torch.bfloat16, META,
            LIMITS.max_model_len, TritonAttention(META), TritonOps(META),
        )  # fmt: skip
        caches = []
        for spec in stage.kv_layer_specs:
            assert isinstance(spec, KVLayerSpec)
            shape = (LIMITS.num_blocks, 2, LIMITS.block_size, spec.num_kv_heads, spec.head_dim)
            caches.append(LayerKV(torch.empty(shape, dtype=torch.bfloat16, device=META), 0))
        self.program = EagerProgram(
            stage, tables, caches, state.parts, staging, stage.new_logits(most), drafter,
            DraftVerifier(tables, drafter),
        )  # fmt: skip
        ladder = StepLadder(
            decode_sizes(LIMITS.max_num_seqs),
            lambda size: [LIMITS.max_model_len],
            mixed_plans(
                LIMITS.max_num_seqs, 64, LIMITS.max_model_len,
                max_num_samples=LIMITS.max_num_samples,
            ),
            drafts=drafted_counts(LIMITS.max_drafts),
            max_num_tokens=LIMITS.max_num_batched_tokens,
        )  # fmt: skip
        self.plans = self.inputs.with_parts(ladder.plans)

    def compute(self, plan: Any) -> None:
        inputs = self.inputs.padding(plan)
        arrived = torch.empty((0, 64), dtype=torch.bfloat16, device=META)
        with OnDeviceOnly():
            inputs.packed.take()
            self.program.compute(inputs, arrived)


LOOKUPS = {
    "ngram": ["_append_kernel", "_continue_kernel"],
    "suffix": ["_append_kernel", "_keep_kernel", "_vote_kernel"],
    "driver": [],
}
FOLLOWS = {"ngram": [], "suffix": ["_keep_kernel"], "driver": []}
"""What a plain decode launches for a drafter that rests."""


@pytest.mark.parametrize("method", LOOKUPS)
def test_a_graph_holds_all_that_follows_a_step_s_drafts(method: str, launches: list[str]) -> None:
    made, without = Program(method, TritonTextKernels()), Program("none", TritonTextKernels())
    assert any(plan.shape.num_corrected for plan in made.plans)
    for plan in made.plans:
        launches.clear()
        without.compute(plan)
        others = [*launches]
        launches.clear()
        made.compute(plan)
        stored = launches.index("_store_tokens_kernel") + 1
        if plan.shape.num_corrected:
            outcome = ["_verify_kernel", "_store_counts_kernel", *LOOKUPS[method]]
            assert launches[stored:] == outcome
        else:
            follows = FOLLOWS[method] if plan.max_query_len == 1 else []
            assert Counter(launches) == Counter(others + follows)
        assert launches[0] == "_take_columns_kernel"


def test_a_call_that_waits_for_the_device_fails(launches: list[str]) -> None:
    """Those of plain torch read lengths on the host."""
    made = Program("ngram", TorchTextKernels())
    exact = [plan for plan in made.plans if not plan.shape.num_corrected]
    made.compute(exact[0])
    with pytest.raises((RuntimeError, NotImplementedError)):
        made.compute(made.plans[0])

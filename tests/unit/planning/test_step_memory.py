"""The estimate of the largest step, against what a stage keeps alive and what the runner makes."""

import weakref

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from worker_daemon.contracts.attention import AttentionMetadata
from worker_daemon.contracts.layer_ops import computed
from worker_daemon.distributed.tp import SingleRank
from worker_daemon.layers.attention import NullAttention
from worker_daemon.layers.torch_ops import TorchOps
from worker_daemon.models.config import parse_model_config
from worker_daemon.models.decoder import build_stage
from worker_daemon.plan.step_memory import StageWidths, estimate_step_bytes
from worker_daemon.runner.scheduled_step import StepLimits

NUM_TOKENS = 512
HIDDEN_SIZE = 64


class OutputsOnly(TorchOps):
    """Allocates what the fused kernels of a GPU do, a result for each operation, and computes
    nothing."""

    def product(self, source, matrix, epilogue):
        x, total = computed(source, self)
        x = x.new_empty(x.shape[0], matrix.shape[0])  # frees the inputs
        gate = epilogue.activation
        return (x if gate is None else self.act_and_mul(x, gate)), total

    def rms_norm(self, x, norm):
        return torch.empty_like(x)

    def sum_and_norm(self, source):
        residual = source.residual
        total = residual if source.part is None else torch.empty_like(residual)
        return torch.empty_like(residual), total

    def act_and_mul(self, gate_up, activation):
        return gate_up.new_empty(gate_up.shape[0], gate_up.shape[1] // 2)

    def rotate_and_store(
        self, qkv, positions, table, num_kv_heads, head_dim, norms, *cache, interleaved=False
    ):
        heads = qkv.view(qkv.shape[0], -1, head_dim)
        return heads[:, : heads.shape[1] - 2 * num_kv_heads]


class LiveBytes(TorchDispatchMode):
    """Counts the bytes of the storages that were made inside and are alive."""

    def __init__(self):
        super().__init__()
        self.peak = 0
        self._users = {}
        self._sizes = {}

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        for tensor in tree_leaves(out):
            if isinstance(tensor, torch.Tensor):
                self._count(tensor)
        self.peak = max(self.peak, sum(self._sizes.values()))
        return out

    def _count(self, tensor):
        storage = tensor.untyped_storage()
        address = storage.data_ptr()
        self._sizes.setdefault(address, storage.nbytes())
        self._users[address] = self._users.get(address, 0) + 1
        weakref.finalize(tensor, self._forget, address)

    def _forget(self, address):
        self._users[address] -= 1
        if not self._users[address]:
            del self._users[address], self._sizes[address]


def peak_of_layers(heads, kv_heads, head_dim, inner_size):
    config = parse_model_config(
        {
            "architectures": ["LlamaForCausalLM"],
            "vocab_size": 128,
            "hidden_size": HIDDEN_SIZE,
            "intermediate_size": inner_size,
            "num_hidden_layers": 3,
            "num_attention_heads": heads,
            "num_key_value_heads": kv_heads,
            "head_dim": head_dim,
            "max_position_embeddings": NUM_TOKENS,
        }
    )
    device = torch.device("cpu")
    stage = build_stage(
        config,
        range(3),
        True,
        False,
        SingleRank(),
        torch.float32,
        device,
        NUM_TOKENS,
        NullAttention(),
        OutputsOnly(),
    )
    nothing = torch.empty(0, dtype=torch.int32)
    metadata = AttentionMetadata(
        *[nothing] * 6,
        num_seqs=1,
        max_query_len=NUM_TOKENS,
        max_seq_len=NUM_TOKENS,
        query_lens_np=nothing.numpy(),
        seq_lens_np=nothing.numpy(),
    )
    ids = torch.zeros(NUM_TOKENS, dtype=torch.int64)
    with torch.inference_mode(), LiveBytes() as live:
        stage.forward(stage.embed(ids), ids, (), [metadata] * len(stage.kv_layer_specs))
    return live.peak


def limits(
    max_num_seqs=1,
    max_num_batched_tokens=NUM_TOKENS,
    max_model_len=NUM_TOKENS,
    block=16,
    max_samples_per_seq=1,
):
    return StepLimits(
        max_num_seqs=max_num_seqs,
        max_num_batched_tokens=max_num_batched_tokens,
        max_model_len=max_model_len,
        vocab_size=1000,
        block_size=block,
        num_blocks=1 << 30,
        max_samples_per_seq=max_samples_per_seq,
    )


def widths(**changes):
    fields = {
        "hidden_size": 64,
        "projected_size": 96,
        "mixed_size": 64,
        "inner_size": 128,
        "vocab_size": 1000,
        "vocab_rows": 1024,
        "itemsize": 2,
        "pp_size": 1,
        "tp_size": 1,
        "is_first_stage": True,
        "is_last_stage": True,
    }
    return StageWidths(**{**fields, **changes})


@pytest.mark.parametrize("samples", [1, 3])
def test_the_buffer_of_logits_counts_and_the_rows_of_it_that_wait_to_be_sampled(samples):
    """Of this rank's share of the vocabulary, with its padding; of several samples of a request."""
    rows, more = 32, 640
    own = limits(max_num_seqs=rows, max_samples_per_seq=samples)
    small, large = (
        estimate_step_bytes(widths(vocab_rows=size), own) for size in (1024, 1024 + more)
    )
    least = 2 * rows * samples * more * 2
    assert least < large - small < 1.1 * least
    inner = widths(vocab_rows=1024 + more, is_last_stage=False)
    outer = widths(vocab_rows=1024, is_last_stage=False)
    assert estimate_step_bytes(inner, limits()) == estimate_step_bytes(outer, limits())


@pytest.mark.parametrize(
    ("heads", "kv_heads", "head_dim", "inner_size"),
    [(4, 2, 16, 256), (4, 4, 16, 128), (4, 1, 16, 16), (16, 16, 32, 64), (2, 1, 128, 32)],
)
def test_layers_take_what_a_stage_keeps_alive(heads, kv_heads, head_dim, inner_size):
    peak = peak_of_layers(heads, kv_heads, head_dim, inner_size)
    estimate = estimate_step_bytes(
        widths(
            hidden_size=HIDDEN_SIZE,
            projected_size=(heads + 2 * kv_heads) * head_dim,
            mixed_size=heads * head_dim,
            inner_size=inner_size,
            itemsize=4,
            is_last_stage=False,
        ),
        limits(),
    )
    assert peak < estimate < 1.25 * peak

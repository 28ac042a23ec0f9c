"""Blocks of an encoder: tokens attend to their whole prompt, which is in one step; nothing is
cached. A norm follows each addition to the residual stream.

Shapes: N tokens in the step, B prompts, Hq heads of this rank, D head_dim, H hidden size.
"""

from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass
from typing import ClassVar

import torch
from torch import Tensor
from torch.nn import functional

from worker_daemon.contracts.attention import AttentionBackend, AttentionMetadata, AttentionStep
from worker_daemon.layers.attention import HeadSizes
from worker_daemon.layers.linear import ColumnParallelLinear, RowParallelLinear, even_shard
from worker_daemon.layers.norm import Part, residual_stream
from worker_daemon.layers.parameter import Parameter, Piece, whole_vector
from worker_daemon.layers.setup import LayerSetup
from worker_daemon.layers.token_mixer import MixerWidths


@dataclass(frozen=True, slots=True)
class EncoderEmbeddingSpec:
    """Additions to a token's embedding, and the norm after them."""

    num_positions: int
    """Rows of the table of positions."""
    first_position: int
    """Row of a prompt's first token."""
    num_token_types: int
    layer_norm_eps: float


@dataclass(frozen=True, slots=True)
class EncoderAttentionSpec:
    """Attention of a whole prompt, and the norm after it."""

    heads: HeadSizes
    """The model's heads."""
    layer_norm_eps: float
    rope: ClassVar[None] = None
    sliding_window: ClassVar[int | None] = None

    @property
    def split_sizes(self) -> Mapping[str, int]:
        """See TokenMixerSpec."""
        return {"num_attention_heads": self.heads.num_attention_heads}

    @property
    def weight_sizes(self) -> Mapping[str, int]:
        """See TokenMixerSpec."""
        return asdict(self.heads)

    def num_weights(self, hidden_size: int) -> int:
        """See TokenMixerSpec."""
        return 4 * hidden_size * self.heads.num_attention_heads * self.heads.head_dim

    def widths(self, tp_size: int) -> MixerWidths:
        """See TokenMixerSpec."""
        size = self.heads.num_attention_heads // tp_size * self.heads.head_dim
        return MixerWidths(3 * size, size, 0)


@dataclass(frozen=True, slots=True)
class EncoderMLPSpec:
    """Two matrices with GELU between them, and the norm after them."""

    intermediate_size: int
    layer_norm_eps: float


class LayerNorm:
    """(x - mean) / sqrt(variance + eps) * w + b over the residual stream's width."""

    def __init__(self, name: str, eps: float, setup: LayerSetup) -> None:
        size = setup.hidden_size
        weight, bias = f"{name}.weight", f"{name}.bias"
        self._weight = setup.parameter(weight, (size,), (whole_vector(weight, size, "norm"),))
        self._bias = setup.parameter(bias, (size,), (whole_vector(bias, size, "bias"),))
        self._eps = eps

    def forward(self, x: Tensor) -> Tensor:
        """x [N, H] -> the same shape and dtype."""
        weight, bias = self._weight.data, self._bias.data
        return functional.layer_norm(x, weight.shape, weight, bias, self._eps)

    def parameters(self) -> Iterator[Parameter]:
        yield self._weight
        yield self._bias


class EncoderEmbedding:
    """Adds positions and token types to token embeddings: type 0, unless add_second_type was called
    before. Replicated on every rank of the first stage."""

    def __init__(self, spec: EncoderEmbeddingSpec, setup: LayerSetup) -> None:
        self._first = spec.first_position
        self._positions = _table("position_embeddings", spec.num_positions, setup)
        self._types = _table("token_type_embeddings", spec.num_token_types, setup)
        self._norm = LayerNorm("embeddings.LayerNorm", spec.layer_norm_eps, setup)

    def forward(self, hidden: Tensor, positions: Tensor) -> Tensor:
        """hidden [N, H], positions int32 or int64 [N] -> [N, H]."""
        places = functional.embedding(positions + self._first, self._positions.data)
        return self._norm.forward(hidden + self._types.data[0] + places)

    def add_second_type(self, hidden: Tensor, tokens: Tensor) -> Tensor:
        """Give tokens of hidden [N, H], the input of forward, type 1. tokens: their indices, int64
        [E]. Changes hidden and returns it."""
        difference = self._types.data[1] - self._types.data[0]
        return hidden.index_add_(0, tokens, difference.expand(tokens.shape[0], -1))

    def parameters(self) -> Iterator[Parameter]:
        yield self._positions
        yield self._types
        yield from self._norm.parameters()


class EncoderLayer:
    """An attention block and an MLP block, each added to the residual stream and normed. It has no
    KV cache."""

    kv_spec = None
    rope = None

    def __init__(
        self, index: int, attention: EncoderAttentionSpec, mlp: EncoderMLPSpec, setup: LayerSetup
    ) -> None:
        name, hidden, tp = f"encoder.layer.{index}", setup.hidden_size, setup.tp
        heads, inner = attention.heads, mlp.intermediate_size
        self._head_dim = heads.head_dim
        self._ops = setup.ops
        self._tp = tp
        self._qkv = ColumnParallelLinear(
            f"{name}.attention.self.qkv",
            [
                even_shard(f"{name}.attention.self.{part}", hidden, tp)
                for part in ("query", "key", "value")
            ],
            hidden,
            setup,
            bias=True,
        )
        self._out = RowParallelLinear(
            f"{name}.attention.output.dense", hidden, hidden, setup, bias=True
        )
        self._attention_norm = LayerNorm(
            f"{name}.attention.output.LayerNorm", attention.layer_norm_eps, setup
        )
        self._up = ColumnParallelLinear(
            f"{name}.intermediate.dense.merged",
            [even_shard(f"{name}.intermediate.dense", inner, tp)],
            hidden,
            setup,
            bias=True,
        )
        self._down = RowParallelLinear(f"{name}.output.dense", inner, hidden, setup, bias=True)
        self._mlp_norm = LayerNorm(f"{name}.output.LayerNorm", mlp.layer_norm_eps, setup)

    def forward(
        self,
        part: Part,
        residual: Tensor,
        kv_cache: Tensor,
        step: AttentionStep,
        backend: AttentionBackend,
    ) -> tuple[None, Tensor]:
        """Take and return the residual stream, [N, H], like DecoderLayer.forward; ignores cache and
        backend, which layers with a KV cache use."""
        x = residual_stream(part, residual, self._ops, self._tp)
        heads = self._qkv.forward(x).view(x.shape[0], 3, -1, self._head_dim)
        q, k, v = heads.unbind(1)
        out = self._out.forward(attend_whole(q, k, v, step.metadata).flatten(1))
        x = self._attention_norm.forward(x + self._tp.all_reduce(out))
        out = self._down.forward(functional.gelu(self._up.forward(x)))
        return None, self._mlp_norm.forward(x + self._tp.all_reduce(out))

    def parameters(self) -> Iterator[Parameter]:
        for layer in (
            self._qkv,
            self._out,
            self._attention_norm,
            self._up,
            self._down,
            self._mlp_norm,
        ):
            yield from layer.parameters()


def attend_whole(q: Tensor, k: Tensor, v: Tensor, metadata: AttentionMetadata) -> Tensor:
    """q, k, v [N, Hq, D] -> [N, Hq, D]: each token attends to all tokens of its prompt, which are
    all in the step. Never waits for the device."""
    if q.device.type == "cuda" and q.dtype in (torch.bfloat16, torch.float16):
        # Imports torch's compiler, which takes seconds; the warm-up is the first caller.
        from torch.nn.attention.varlen import varlen_attn

        starts, longest = metadata.query_start_loc, metadata.max_query_len
        out = varlen_attn(q, k, v, starts, starts, longest, longest)
        assert isinstance(out, Tensor), "no statistics were asked for"
        return out
    lengths = metadata.query_lens_np.tolist()
    pieces = []
    for of_prompt in zip(*(torch.split(rows, lengths) for rows in (q, k, v)), strict=True):
        heads = (rows.transpose(0, 1).unsqueeze(0) for rows in of_prompt)
        pieces.append(functional.scaled_dot_product_attention(*heads).squeeze(0).transpose(0, 1))
    return torch.cat(pieces)


def _table(name: str, num_rows: int, setup: LayerSetup) -> Parameter:
    full_name, shape = f"embeddings.{name}.weight", (num_rows, setup.hidden_size)
    whole = (slice(0, num_rows), slice(0, setup.hidden_size))
    return setup.parameter(full_name, shape, (Piece(full_name, shape, whole, whole),))

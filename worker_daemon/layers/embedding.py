"""Token embedding and LM head, both split over the vocabulary. Padded ids never leave this module.

The vocabulary V is padded up to the next multiple of 64 * tp, so that every rank holds the same
number of rows, a multiple of 64 (whole tiles for a matrix multiplication). Padding rows are zero,
and their logits are dropped.

Shapes: R rows with logits, H hidden size, v a rank's share of V, padding included.
"""

from collections.abc import Iterator

import torch
from torch import Tensor
from torch.nn import functional

from worker_daemon.contracts.layer_ops import NO_TOKEN
from worker_daemon.distributed.tp import TensorParallel
from worker_daemon.layers.linear_method import LinearMethod, PlainMatrix
from worker_daemon.layers.parameter import Kind, Parameter, Piece
from worker_daemon.layers.setup import LayerSetup

_ROW_MULTIPLE = 64


def padded_vocab_size(vocab_size: int, tp_size: int) -> int:
    """Return the smallest multiple of 64 * tp_size that is at least vocab_size."""
    multiple = _ROW_MULTIPLE * tp_size
    return -(-vocab_size // multiple) * multiple


def vocab_parallel_weight(
    name: str,
    vocab_size: int,
    setup: LayerSetup,
    kind: Kind = "matrix",
    alias: str | None = None,
) -> Parameter:
    """Return this rank's rows of checkpoint tensor `name` [V, H]; zeros beyond the vocabulary.
    alias: see Piece."""
    tp, hidden_size = setup.tp, setup.hidden_size
    rows = padded_vocab_size(vocab_size, tp.size) // tp.size
    start = tp.rank * rows
    present = max(0, min(vocab_size - start, rows))
    columns = slice(0, hidden_size)
    piece = Piece(
        name,
        (vocab_size, hidden_size),
        (slice(start, start + present), columns),
        (slice(0, present), columns),
        kind,
        alias=alias,
    )
    pieces = (piece,) if present else ()
    return setup.parameter(name, (rows, hidden_size), pieces)


class VocabParallelEmbedding:
    """Maps ids to rows of the embedding, times a factor. The LM head may share its weight."""

    def __init__(self, weight: Parameter, tp: TensorParallel, scale: float | None = None) -> None:
        """scale: the factor, rounded to the weight's dtype before the product; None: no factor."""
        self._weight = weight
        self._tp = tp
        dtype = weight.data.dtype
        self._scale = None if scale is None else torch.tensor(scale, dtype=dtype).item()

    def forward(self, input_ids: Tensor) -> Tensor:
        """input_ids int32 or int64 [N], each below V -> [N, H], equal on every rank."""
        hidden = self._look_up(input_ids)
        return hidden if self._scale is None else hidden.mul_(self._scale)

    def _look_up(self, input_ids: Tensor) -> Tensor:
        if self._tp.size == 1:
            return functional.embedding(input_ids, self._weight.data)
        rows = self._weight.data.shape[0]
        local = input_ids - self._tp.rank * rows
        elsewhere = (local < 0) | (local >= rows)
        hidden = functional.embedding(local.masked_fill(elsewhere, 0), self._weight.data)
        return self._tp.all_reduce(hidden.masked_fill(elsewhere.unsqueeze(-1), 0))

    def parameters(self) -> Iterator[Parameter]:
        yield self._weight


class LMHead:
    """Computes logits over the unpadded vocabulary from hidden states, gathered from all ranks."""

    def __init__(
        self,
        weight: Parameter,
        vocab_size: int,
        setup: LayerSetup,
        logit_softcap: float | None = None,
    ) -> None:
        """weight: from `vocab_parallel_weight`; may be shared with the embedding. logit_softcap:
        limits all logits, which become logit_softcap * tanh(logit / logit_softcap)."""
        self._weight = weight
        self._rows = weight.data.shape[0]
        self._method = LinearMethod(PlainMatrix(weight), None, setup.ops)
        self._vocab_size = vocab_size
        self._softcap = logit_softcap
        self._ops = setup.ops
        self._tp = setup.tp

    def forward(self, hidden: Tensor) -> Tensor:
        """hidden [R, H] -> [R, V] as gather returns it."""
        return self.gather(self._capped(self._method.forward(hidden)))

    def new_logits(self, num_rows: int) -> Tensor:
        """Return memory for this rank's logits [num_rows, v]."""
        return self._weight.data.new_empty((num_rows, self._rows))

    def new_gathered(self, num_rows: int) -> Tensor:
        """Return memory for all logits [num_rows, V], with the strides of gather's result."""
        local, size = self.new_logits(num_rows), self._tp.size
        if size > 1:
            local = local.new_empty(num_rows, local.shape[1] * size)
        return local[:, : self._vocab_size]

    def multiply(self, hidden: Tensor, out: Tensor) -> Tensor:
        """hidden [R, H] -> this rank's logits [R, v], in out."""
        return self._capped(self._method.forward(hidden, out))

    def _capped(self, logits: Tensor) -> Tensor:
        """Limit logits in place; each operation rounds, as in transformers."""
        cap = self._softcap
        return logits if cap is None else logits.div_(cap).tanh_().mul_(cap)

    def gather(self, local: Tensor) -> Tensor:
        """Each rank's logits [R, v] -> [R, V] in the model's dtype, equal on every rank: a view of
        local if there is only one. Each row is contiguous, with possible padding between rows."""
        return self._tp.all_gather_last_dim(local)[:, : self._vocab_size]

    def likeliest(self, local: Tensor) -> Tensor:
        """Each rank's logits [R, v] -> int64 [R]: each row's token with the largest logit, the
        lowest id among equals; NO_TOKEN as in LayerOps.greedy_tokens. With several ranks each sends
        only its best token, not its logits."""
        if self._tp.size == 1:
            return self._ops.greedy_tokens(local, self._vocab_size)
        first = self._tp.rank * self._rows
        present = min(self._vocab_size - first, self._rows)
        best = local.new_full((local.shape[0], 2), -torch.inf, dtype=torch.float32)
        if present > 0:
            token_ids = self._ops.greedy_tokens(local, present)
            is_none = token_ids == NO_TOKEN
            values = local.gather(1, token_ids.clamp(min=0).unsqueeze(1)).squeeze(1)
            best[:, 0] = values.masked_fill(is_none, torch.nan)
            # exact: ids are below 2^24
            best[:, 1] = (token_ids + first).masked_fill(is_none, NO_TOKEN)
        of_all = self._tp.all_gather_last_dim(best).view(-1, self._tp.size, 2)
        winner = of_all[:, :, 0].argmax(dim=-1, keepdim=True)  # a NaN wins
        return of_all[:, :, 1].gather(1, winner).squeeze(1).long()

    def parameters(self) -> Iterator[Parameter]:
        return self._method.parameters()

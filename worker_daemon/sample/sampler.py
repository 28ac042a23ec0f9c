"""Chooses tokens from logits. A row's token depends only on that row, not on the rest of the batch.

To ensure this, every reduction over the vocabulary is exact in any order: maxima, sorts and sums of
integers. `TorchSampling` is the reference implementation. Shapes: R rows, V vocabulary.
"""

from dataclasses import replace

import torch
from torch import Tensor

from worker_daemon.contracts.layer_ops import NO_TOKEN
from worker_daemon.contracts.sampling import DraftsBefore, PenaltyTables, SamplingMetadata
from worker_daemon.layers.torch_ops import likeliest
from worker_daemon.sample import penalties
from worker_daemon.sample.noise import gumbel_noise

_WEIGHT_ONE = 2.0**40
_CHUNK_ELEMENTS = 1 << 25


class TorchSampling:
    """Plain torch operations, on every device. Stateless."""

    name = "torch"

    def masked(self, logits: Tensor, words: Tensor, mask_of_row: Tensor) -> Tensor:
        """[R, V] for logits [R, V], int32 words [M, W] and int32 [R]: see Sampling."""
        rows = (mask_of_row >= 0).nonzero().squeeze(1)
        bits = torch.arange(32, dtype=torch.int32, device=words.device)
        own = words[mask_of_row[rows].long()]
        is_banned = (own.unsqueeze(2) >> bits & 1 == 0).flatten(1)[:, : logits.shape[1]]
        out = logits.clone()
        out[rows] = logits[rows].masked_fill(is_banned, -torch.inf)
        return out

    def tokens(self, logits: Tensor, metadata: SamplingMetadata) -> Tensor:
        """Return int64 [R] for logits [R, V]. Never waits for the device."""
        greedy = likeliest(logits)
        if not metadata.any_random:
            return greedy
        has_token = (metadata.temperature > 0) & (greedy != NO_TOKEN)
        return torch.where(has_token, _sample_random(logits, metadata), greedy)

    def penalized(
        self,
        logits: Tensor,
        slots: Tensor,
        tables: PenaltyTables,
        drafts: DraftsBefore | None = None,
    ) -> Tensor:
        """See Sampling."""
        return penalties.penalized(logits, slots, tables, drafts)

    def count_tokens(
        self, slots: Tensor, token_ids: Tensor, tables: PenaltyTables, most: int = 1
    ) -> None:
        """See Sampling."""
        penalties.count_tokens(slots, token_ids, tables, most)


def drawn_logprobs(
    logits: Tensor, token_ids: Tensor, metadata: SamplingMetadata, *, are_drawn: bool
) -> Tensor:
    """Return float32 [R], the log probability of each of token_ids int64 [R] in the distribution
    that its row draws from: the softmax of logits [R, V] after temperature and filters. In a greedy
    row it is 0 for the most likely token, and -inf for others.

    are_drawn: other rows have drawn their tokens. So filters keep these, also where the last bit of
    exp differs from that of the implementation which has drawn them. Meaningless for NO_TOKEN.
    Sorts all rows at once.
    """
    is_greedy = metadata.temperature == 0
    certain = torch.zeros_like(metadata.temperature)
    certain = certain.masked_fill(token_ids != likeliest(logits), -torch.inf)
    if not metadata.any_random:
        return certain
    chosen = token_ids.clamp(min=0).unsqueeze(1)
    scaled = _scale(logits.float(), metadata.temperature)
    kept = _filtered(scaled, metadata)
    if are_drawn:
        kept = kept.scatter(1, chosen, scaled.gather(1, chosen))
    drawn = kept.gather(1, chosen).squeeze(1) - kept.logsumexp(dim=1)
    return torch.where(is_greedy, certain, drawn)


def _sample_random(logits: Tensor, metadata: SamplingMetadata) -> Tensor:
    """Return int64 [R]. Works on a few rows at a time, to bound the memory of sorting and noise."""
    num_rows, vocab_size = logits.shape
    step = max(1, _CHUNK_ELEMENTS // vocab_size)
    chunks = [
        _sample_chunk(
            logits[start : start + step].float(), _rows(metadata, slice(start, start + step))
        )
        for start in range(0, num_rows, step)
    ]
    return torch.cat(chunks) if chunks else logits.new_empty(0, dtype=torch.int64)


def _rows(metadata: SamplingMetadata, rows: slice) -> SamplingMetadata:
    return replace(
        metadata,
        temperature=metadata.temperature[rows],
        top_k=metadata.top_k[rows],
        top_p=metadata.top_p[rows],
        min_p=metadata.min_p[rows],
        seeds=metadata.seeds[rows],
        positions=metadata.positions[rows],
    )


def _sample_chunk(logits: Tensor, metadata: SamplingMetadata) -> Tensor:
    scaled = _filtered(_scale(logits, metadata.temperature), metadata)
    noise = gumbel_noise(metadata.seeds, metadata.positions, logits.shape[1])
    return (scaled + noise).argmax(dim=-1)


def _filtered(scaled: Tensor, metadata: SamplingMetadata) -> Tensor:
    """Return scaled logits with -inf for the tokens that the filters drop."""
    if metadata.any_min_p:
        scaled = _filter_min_p(scaled, metadata.min_p)
    if metadata.any_top_k or metadata.any_top_p:
        scaled = _filter_top_k_top_p(scaled, metadata.top_k, metadata.top_p)
    return scaled


def _scale(logits: Tensor, temperature: Tensor) -> Tensor:
    """Return (logit - largest) / temperature. The largest becomes 0, so that no temperature makes
    it overflow."""
    divisor = torch.where(temperature == 0, 1.0, temperature).unsqueeze(1)
    return (logits - logits.amax(dim=-1, keepdim=True)) / divisor


def _filter_min_p(scaled: Tensor, min_p: Tensor) -> Tensor:
    """Drop tokens less likely than min_p times the most likely one, whose scaled logit is 0."""
    least = min_p.to(torch.float64).log().to(torch.float32)
    return scaled.masked_fill(scaled < least.unsqueeze(1), -torch.inf)


def _filter_top_k_top_p(scaled: Tensor, top_k: Tensor, top_p: Tensor) -> Tensor:
    """Keep the top_k largest, and of these the fewest whose probability reaches top_p."""
    vocab_size = scaled.shape[1]
    ordered = scaled.sort(dim=-1, descending=True).values
    num_kept = torch.where(top_k == 0, vocab_size, top_k.clamp(max=vocab_size)).to(torch.int64)
    kth = ordered.gather(1, num_kept.unsqueeze(1) - 1)
    weights = _weights(ordered).masked_fill(ordered < kth, 0)
    before = weights.cumsum(dim=-1) - weights
    limit = weights.sum(dim=-1) * top_p.to(torch.float64)
    is_kept = (before < limit.unsqueeze(1)) & (ordered >= kth)
    last = (is_kept.sum(dim=-1, keepdim=True) - 1).clamp_(min=0)  # a row of -inf keeps none
    return scaled.masked_fill(scaled < ordered.gather(1, last), -torch.inf)


def _weights(scaled: Tensor) -> Tensor:
    """Return exp as a fixed-point integer, int64: sums stay below 2^63 for vocabularies under 2^23.

    A token below 2^-40 of the most likely one has weight zero and is dropped even for top_p = 1.
    Its logit is 27.7 lower, and Gumbel noise, which spans 25.8, could never make it the largest.
    """
    return scaled.exp().mul_(_WEIGHT_ONE).to(torch.int64)

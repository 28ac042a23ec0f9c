"""Runs stages over a paged cache, on any device, for comparisons with transformers."""

from collections.abc import Sequence
from dataclasses import fields

import numpy as np
import torch

from worker_daemon.contracts.attention import AttentionMetadata
from worker_daemon.layers.cache_spec import CacheSpec, StateLayerSpec
from worker_daemon.models.decoder import DecoderStage

MAX_LEN = 96
BLOCK_SIZE = 4


class StepTensors:
    """A step's inputs on the device."""

    def __init__(
        self, token_ids: np.ndarray, positions: np.ndarray, metadata: AttentionMetadata
    ) -> None:
        """token_ids, positions: int64 [N], padding included. metadata: on the device."""
        device = metadata.seq_lens.device
        self.token_ids = torch.from_numpy(token_ids).to(device)
        self.positions = torch.from_numpy(positions).to(device)
        self.metadata = metadata

    def copy_from(self, other: "StepTensors") -> None:
        """Take the values of a step of the same sizes, as a graph's inputs do."""
        for mine, given in zip(self._tensors(), other._tensors(), strict=True):
            mine.copy_(given)

    def _tensors(self) -> list[torch.Tensor]:
        columns = [getattr(self.metadata, field.name) for field in fields(self.metadata)]
        found = [column for column in columns if isinstance(column, torch.Tensor)]
        return [self.token_ids, self.positions, *found]


class PagedRun:
    """Runs stages over sequences that grow by chunks, with a shuffled block table."""

    def __init__(
        self,
        stages: Sequence[DecoderStage],
        sequences: Sequence[np.ndarray],
        seed: int = 0,
        *,
        max_len: int = MAX_LEN,
        block_size: int = BLOCK_SIZE,
        dtype: torch.dtype = torch.float32,
        device: str = "cpu",
    ) -> None:
        """sequences: token ids, of at most max_len tokens each; dtype: of the caches."""
        self.stages, self.sequences = stages, sequences
        self.done = [0] * len(sequences)
        self._max_len, self._block_size, self._device = max_len, block_size, device
        blocks_each = -(-max_len // block_size)
        num_blocks = 1 + blocks_each * len(sequences)
        order = np.random.default_rng(seed).permutation(num_blocks - 1) + 1
        self.table = order.reshape(len(sequences), blocks_each).astype(np.int32)
        spare = len(sequences)

        def cache(spec: CacheSpec) -> torch.Tensor:
            if isinstance(spec, StateLayerSpec):
                shape, kept = (spare + 1, *spec.shape), spec.dtype
            else:
                shape, kept = (num_blocks, *spec.page_shape(block_size)), dtype
            return torch.full(shape, torch.nan, dtype=kept, device=device)

        self.caches = [[cache(spec) for spec in stage.kv_layer_specs] for stage in stages]

    def step(self, counts: Sequence[int], num_padding: int = 0) -> torch.Tensor:
        """Run counts[i] more tokens of sequence i; return float32 logits of all real tokens."""
        return self.compute(self.advance(counts, num_padding))[: sum(counts)]

    def prefill(self) -> Sequence[torch.Tensor]:
        """Return the logits of each sequence, all in one step."""
        logits = self.step([len(s) for s in self.sequences])
        return logits.split([len(s) for s in self.sequences])

    def advance(
        self, counts: Sequence[int], num_padding: int = 0, max_seq_len: int | None = None
    ) -> StepTensors:
        """Return the inputs of the next step. max_seq_len: the bound on lengths that launches
        depend on; None = the longest one."""
        active = [i for i, count in enumerate(counts) if count]
        positions = [np.arange(self.done[i], self.done[i] + counts[i]) for i in active]
        ids = np.concatenate(
            [np.asarray(self.sequences[i])[p] for i, p in zip(active, positions, strict=True)]
        )
        size = self._block_size
        slots = np.concatenate(
            [
                self.table[i][p // size] * size + p % size
                for i, p in zip(active, positions, strict=True)
            ]
        )
        for i in active:
            self.done[i] += counts[i]
        query_lens = np.array([counts[i] for i in active], dtype=np.int32)
        seq_lens = np.array([self.done[i] for i in active], dtype=np.int32)
        starts = np.concatenate(([0], np.cumsum(query_lens)))

        def column(values: np.ndarray | Sequence[int]) -> torch.Tensor:
            return torch.from_numpy(np.array(values, np.int32)).to(self._device)

        metadata = AttentionMetadata(
            query_start_loc=column(starts),
            seq_lens=column(seq_lens),
            block_table=column(self.table),
            seq_rows=column(active),
            seq_order=column(range(len(active))),
            slot_mapping=column(np.pad(slots, (0, num_padding))).long(),
            num_seqs=len(active),
            max_query_len=int(query_lens.max()),
            max_seq_len=max_seq_len or int(seq_lens.max()),
            query_lens_np=query_lens,
            seq_lens_np=seq_lens,
        )
        flat, padded = (
            np.pad(values, (0, num_padding)).astype(np.int64)
            for values in (np.concatenate(positions), ids)
        )
        return StepTensors(padded, flat, metadata)

    def compute(self, inputs: StepTensors) -> torch.Tensor:
        """Return the logits of a step's tokens, those of padding at the end."""
        hidden = self.stages[0].embed(inputs.token_ids)
        for stage, caches in zip(self.stages, self.caches, strict=True):
            of_layers = [inputs.metadata] * len(stage.kv_layer_specs)
            hidden = stage.forward(hidden, inputs.positions, caches, of_layers)
        return self.stages[-1].compute_logits(hidden)

"""Paged batches as a step of the runner describes them, for the tests of prompt attention."""

import numpy as np
import torch

from benchmarks.paged_reference import PagedBatch
from worker_daemon.layers.attention import AttentionMetadata


def step_metadata(batch: PagedBatch) -> AttentionMetadata:
    """What the input builder says of such a step."""
    return AttentionMetadata(
        query_start_loc=batch.query_start_loc,
        seq_lens=batch.seq_lens,
        seq_order=batch.seq_order,
        block_table=batch.block_table,
        seq_rows=batch.seq_rows,
        slot_mapping=batch.slot_mapping,
        num_seqs=batch.num_seqs,
        max_query_len=batch.max_query_len,
        max_seq_len=batch.max_seq_len,
        query_lens_np=np.array(batch.query_lens, np.int32),
        seq_lens_np=np.array([both.shape[1] for both in batch.history], np.int32),
    )


def token_rows(batch: PagedBatch) -> list[torch.Tensor]:
    """The indices of each sequence's tokens in the step."""
    tokens = torch.arange(batch.num_real_tokens, device=batch.q.device)
    return list(tokens.split(batch.query_lens))

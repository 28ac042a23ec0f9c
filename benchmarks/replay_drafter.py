"""A drafter for measurements: it has the outputs that requests gave without drafts, and proposes
them with a share of wrong tokens. So a run has the acceptance that is asked for, whatever the model
is. Verification decides as ever, and the drafter learns of its outcomes as any other does."""

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from worker_daemon.contracts.arrays import Int32s, Int64s
from worker_daemon.device.pinned import upload
from worker_daemon.drafting.interface import NO_PROPOSAL, ComputedStep, Gained
from worker_daemon.drafting.row_texts import DraftLimits


class Recording(NamedTuple):
    """A request and what it gave without drafts."""

    prompt: Sequence[int]
    output: Sequence[int]


class Mistakes(NamedTuple):
    """The share of recorded tokens that are replaced by others of the vocabulary. Equal values
    replace the same tokens by the same others, on each rank."""

    share: float
    vocab_size: int
    seed: int = 0

    def applied(self, token_ids: Int64s) -> Int64s:
        """Return the tokens with mistakes."""
        rng = np.random.default_rng(self.seed)
        others = (token_ids + rng.integers(1, self.vocab_size, token_ids.size)) % self.vocab_size
        return np.where(rng.random(token_ids.size) < self.share, others, token_ids)


class ReplayDrafter:
    """A Drafter of recorded outputs. A row has the recording whose prompt its first tokens are, the
    longest if there are several; other rows get no drafts. Owns the recordings on the device, at
    addresses that stay, so that graphs which hold its launches go on with other recordings."""

    def __init__(self, limits: DraftLimits, num_tokens: int, device: torch.device) -> None:
        """num_tokens: of all recorded outputs at most."""
        self._num_drafts, self._num_tokens = limits.num_drafts, num_tokens
        num_rows = limits.max_num_seqs + 1
        # Behind each output, of which a row has one at most, there are no proposals.
        num_places = num_tokens + self._num_drafts * (1 + num_rows)
        self._tokens = torch.full((num_places,), NO_PROPOSAL, dtype=torch.int64, device=device)
        """int64: the outputs, with no proposals before, between and after them."""
        self._offsets = torch.zeros(num_rows, dtype=torch.int64, device=device)
        """int64 [S + 1]: place of each row's next token, less its length."""
        self._ends = torch.zeros_like(self._offsets)
        """int64 [S + 1]: the end of each row's recording; 0, before all outputs, without one."""
        self._ahead = torch.arange(self._num_drafts, device=device)
        self._by_prompt: dict[bytes, tuple[int, int]] = {}
        self._prompt_lens: list[int] = []

    def load(self, recordings: Sequence[Recording], mistakes: Mistakes) -> None:
        """Replace the recordings, one for each row at most; no row has one until it begins."""
        outputs = [np.array(each.output, np.int64) for each in recordings]
        sizes = [output.size for output in outputs]
        assert sum(sizes) <= self._num_tokens and len(sizes) < self._offsets.shape[0]
        told = mistakes.applied(np.concatenate([np.zeros(0, np.int64), *outputs]))
        after_each = np.full(self._num_drafts, NO_PROPOSAL, np.int64)
        pieces = [after_each]
        for output in np.split(told, np.cumsum(sizes)[:-1]) if sizes else []:
            pieces += [output, after_each]
        tokens = upload(np.concatenate(pieces), self._tokens.device)
        self._tokens.fill_(NO_PROPOSAL)[: tokens.shape[0]] = tokens
        firsts = np.cumsum([0, *sizes[:-1]]) + self._num_drafts * np.arange(1, len(sizes) + 1)
        self._by_prompt = {
            _key(each.prompt): (int(first), int(first) + size)
            for each, first, size in zip(recordings, firsts, sizes, strict=True)
        }
        self._prompt_lens = sorted({len(each.prompt) for each in recordings}, reverse=True)
        self.forget()

    @property
    def follower(self) -> None:
        """See Drafter."""
        return None

    @property
    def texts(self) -> None:
        """See Drafter."""
        return None

    def begin(self, slots: Sequence[int], tokens: Sequence[Int32s]) -> None:
        """See Drafter."""
        if not slots:
            return
        columns = np.array([(*self._find(text),) for text in tokens], np.int64).T
        columns[0] -= [text.size for text in tokens]
        header = upload(np.array([slots, *columns], np.int64), self._offsets.device)
        self._offsets[header[0]] = header[1]
        self._ends[header[0]] = header[2]

    def _find(self, text: Int32s) -> tuple[int, int]:
        """Return the next place of a request with these tokens, and the end of its recording."""
        for prompt_len in self._prompt_lens:
            found = self._by_prompt.get(_key(text[:prompt_len]))
            if found is not None and prompt_len <= text.size:
                first, end = found
                return min(first + text.size - prompt_len, end), end
        return 0, 0

    def follow(self, step: ComputedStep) -> None:
        """See Drafter: a row's length says where its recording goes on."""

    def propose(self, gained: Gained) -> Tensor:
        """See Drafter."""
        rows = gained.rows.long()
        places = torch.minimum(self._offsets[rows] + gained.lengths, self._ends[rows])
        return self._tokens.take(places[:, None] + self._ahead)

    def forget(self) -> None:
        """See Drafter."""
        self._offsets.zero_()
        self._ends.zero_()

    def restart(self) -> None:
        """See Drafter."""
        self.forget()

    def compile_subset(self) -> "ReplayDrafter":
        """See Drafter."""
        return self


def _key(tokens: Sequence[int] | Int32s) -> bytes:
    return np.asarray(tokens, np.int32).tobytes()

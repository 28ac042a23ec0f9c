"""Drafters from text on random requests, compared with plain Python on lists. For the CPU, for the
interpreter's tests and for a GPU."""

import numpy as np
import torch

from rpc_schema.step import NO_TOKEN
from worker_daemon.drafting.interface import Gained


def continued(text, longest, shortest, num_drafts):
    """Return the drafts of prompt lookup by its definition."""
    for size in range(longest, shortest - 1, -1):
        if size >= len(text):
            continue
        tail = text[-size:]
        for end in range(len(text) - 1, size - 1, -1):
            if text[end - size : end] == tail:
                after = text[end:]
                return [after[ahead % len(after)] for ahead in range(num_drafts)]
    return [0] * num_drafts


def as_gained(gains, num_drafts, device):
    """Return Gained of (row, tokens) pairs."""
    width = 1 + num_drafts
    padded = [[*tokens, *[NO_TOKEN] * (width - len(tokens))] for _, tokens in gains]
    return Gained(
        torch.tensor([row for row, _ in gains], dtype=torch.int32, device=device),
        torch.tensor(padded, dtype=torch.int64, device=device).reshape(len(gains), width),
        torch.tensor([len(tokens) for _, tokens in gains], dtype=torch.int32, device=device),
    )


class RandomRequests:
    """Requests that begin, gain and begin again in random rows, and their tokens as lists."""

    def __init__(self, rng, num_rows, max_model_len, num_drafts, vocab_size):
        self.texts = {}
        self._rng, self._vocab_size = rng, vocab_size
        self._num_rows, self._max_len, self._num_drafts = num_rows, max_model_len, num_drafts

    def tokens(self, count):
        return self._rng.integers(0, self._vocab_size, count).tolist()

    def begin(self, drafter, share=0.3, longest=None):
        """Begin requests in a share of the rows; half of them repeat themselves."""
        slots = [row for row in range(self._num_rows) if self._rng.random() < share]
        for row in slots:
            text = self.tokens(self._rng.integers(1, (longest or self._max_len) + 1))
            if self._rng.random() < 0.5:
                period = int(self._rng.integers(1, 9))
                text = (text[:period] * len(text))[: len(text)]
            self.texts[row] = text
        drafter.begin(slots, [np.array(self.texts[row], np.int32) for row in slots])
        return slots

    def gain(self):
        """Return random gains of some rows, in random order, and add them to the texts. Some fail:
        they are forgotten."""
        gains = []
        for row in self._rng.permutation(list(self.texts)).tolist():
            room = self._max_len + self._num_drafts + 1 - len(self.texts[row])
            if self._rng.random() < 0.2:
                continue
            if self._rng.random() < 0.05:
                gains.append((row, [NO_TOKEN]))
                continue
            count = min(room, int(self._rng.integers(0, self._num_drafts + 2)))
            gains.append((row, self.tokens(count)))
            self.texts[row] = self.texts[row] + gains[-1][1]
        return gains


def check_ngram(drafter, requests, config, device, num_steps, longest=None):
    """Check what a drafter proposes after each of some steps against `continued`."""
    matching = (config.prompt_lookup_max, config.prompt_lookup_min, config.num_speculative_tokens)
    requests.begin(drafter, 1.0, longest)
    for _ in range(num_steps):
        gains = requests.gain()
        drafts = drafter.propose(as_gained(gains, config.num_speculative_tokens, device))
        assert drafts.dtype == torch.int64
        expected = [continued(requests.texts[row], *matching) for row, _ in gains]
        assert drafts.tolist() == expected
        requests.begin(drafter, 0.1, longest)

"""Drafters from text on random requests, compared with plain Python on lists. For the CPU, for the
interpreter's tests and for a GPU."""

from collections import Counter

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


def as_gained(gains, num_drafts, device, texts):
    """Return Gained of (row, tokens) pairs. texts: {row: tokens}, those that it gains included;
    rows that it has not are padding."""
    width = 1 + num_drafts
    padded = [[*tokens, *[NO_TOKEN] * (width - len(tokens))] for _, tokens in gains]
    return Gained(
        torch.tensor([row for row, _ in gains], dtype=torch.int32, device=device),
        torch.tensor(padded, dtype=torch.int64, device=device).reshape(len(gains), width),
        torch.tensor([len(tokens) for _, tokens in gains], dtype=torch.int32, device=device),
        torch.tensor(
            [len(texts.get(row, ())) + (tokens == [NO_TOKEN]) for row, tokens in gains],
            dtype=torch.int32,
            device=device,
        ),
    )


class ToldDrafter:
    """A drafter on the CPU, and the texts of its rows, all tokens of which it is told."""

    def __init__(self, drafter):
        self.drafter, self.texts = drafter, {}

    def begin(self, slots, texts):
        self.texts |= {slot: list(text) for slot, text in zip(slots, texts, strict=True)}
        self.drafter.begin(slots, [np.array(text, np.int32) for text in texts])

    def propose(self, gains, num_drafts):
        """Return the drafts of rows after the tokens that these (row, tokens) pairs gain."""
        for row, tokens in gains:
            own = self.texts.get(row, [])
            self.texts[row] = own + [token for token in tokens if token != NO_TOKEN]
        gained = as_gained(gains, num_drafts, torch.device("cpu"), self.texts)
        return self.drafter.propose(gained).tolist()


class RandomRequests:
    """Requests that begin, gain and begin again in random rows, and their tokens as lists."""

    def __init__(self, rng, num_rows, max_model_len, num_drafts, vocab_size):
        self.texts = {}
        self._rng, self._vocab_size = rng, vocab_size
        self._num_rows, self._max_len, self._num_drafts = num_rows, max_model_len, num_drafts

    def padding(self):
        """Return gains of the spare row as padding, of more than there are rows at times."""
        return [(self._num_rows, [])] * int(self._rng.integers(0, 2 * self._num_rows + 3))

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
        gains, padding = requests.gain(), requests.padding()
        gained = as_gained(gains + padding, config.num_speculative_tokens, device, requests.texts)
        drafts = drafter.propose(gained)
        assert drafts.dtype == torch.int64
        expected = [continued(requests.texts[row], *matching) for row, _ in gains]
        assert drafts.tolist() == expected + [[0] * config.num_speculative_tokens] * len(padding)
        requests.begin(drafter, 0.1, longest)


class KeptOutput:
    """The kept output by its definition: pages of 32 tokens, the last ones of all begun."""

    def __init__(self, num_pages):
        self.pages, self._num_pages = [], num_pages
        self._row_page, self._row_request, self._num_requests = {}, {}, 0

    @property
    def oldest(self):
        return max(0, len(self.pages) - self._num_pages)

    def begin(self, rows):
        for row in rows:
            self._num_requests += 1
            self._row_request[row], self._row_page[row] = self._num_requests, None

    def gain(self, gains):
        """Add what rows gain in a step, in this order."""
        oldest = self.oldest
        for row, tokens in gains:
            page = self._row_page[row]
            if page is not None and page < oldest:
                page = None
            for token in [] if tokens == [NO_TOKEN] else tokens:
                if page is None or len(self.pages[page]["tokens"]) == 32:
                    if page is not None:
                        self.pages[page]["next"] = len(self.pages)
                    request = self._row_request[row]
                    new = {"tokens": [], "request": request, "before": page, "next": None}
                    page = len(self.pages)
                    self.pages.append(new)
                self.pages[page]["tokens"].append(token)
            self._row_page[row] = page

    def places(self, row):
        """Yield (newness, tokens up to a place, tokens after it) of other requests."""
        for number in range(self.oldest, len(self.pages)):
            page = self.pages[number]
            if page["request"] == self._row_request[row]:
                continue
            before, after = page["before"], page["next"]
            has_before = before is not None and before >= self.oldest
            earlier = self.pages[before]["tokens"] if has_before else []
            later = self.pages[after]["tokens"] if after is not None else []
            for offset in range(len(page["tokens"])):
                following = page["tokens"][offset + 1 :] + later
                if following:
                    yield (number, offset), earlier + page["tokens"][: offset + 1], following


def common_end(first, second, longest):
    """Return how many last tokens two lists share, at most `longest`."""
    size = 0
    while size < min(longest, len(first), len(second)) and first[-1 - size] == second[-1 - size]:
        size += 1
    return size


def voted(text, kept, row, longest, shortest, num_drafts):
    """Return the drafts of suffix lookup by its definition."""
    places = [
        (common_end(text[:end], text, longest), True, (end, 0), text[end:] * num_drafts)
        for end in range(1, len(text))
    ]
    places += [
        (common_end(earlier, text, longest), False, newness, following)
        for newness, earlier, following in kept.places(row)
    ]
    places = [place for place in places if place[0] >= shortest]
    places = sorted(places, key=lambda place: place[:3], reverse=True)[:32]
    sizes, drafts = [place[0] for place in places], []
    for index in range(num_drafts):
        tokens = [place[3][index] if index < len(place[3]) else None for place in places]
        valid = [
            size
            for size, token in zip(sizes, tokens, strict=True)
            if token is not None and size >= shortest
        ]
        if not valid:
            break
        votes = Counter(
            token
            for size, token in zip(sizes, tokens, strict=True)
            if size == max(valid) and token is not None
        )
        drafts.append(votes.most_common(1)[0][0])  # the first one among equals
        sizes = [
            min(size + 1, longest) if token == drafts[-1] else 0
            for size, token in zip(sizes, tokens, strict=True)
        ]
    return drafts + [0] * (num_drafts - len(drafts))


def check_suffix(drafter, requests, config, device, num_steps, longest=None):
    """Check what a drafter proposes after each of some steps against `voted`."""
    matching = (config.prompt_lookup_max, config.prompt_lookup_min, config.num_speculative_tokens)
    kept = KeptOutput(config.max_kept_tokens // 32)
    kept.begin(requests.begin(drafter, 1.0, longest))
    for _ in range(num_steps):
        gains, padding = requests.gain(), requests.padding()
        kept.gain(gains)
        gained = as_gained(gains + padding, config.num_speculative_tokens, device, requests.texts)
        drafts = drafter.propose(gained)
        expected = [voted(requests.texts[row], kept, row, *matching) for row, _ in gains]
        assert drafts.tolist() == expected + [[0] * config.num_speculative_tokens] * len(padding)
        kept.begin(requests.begin(drafter, 0.1, longest))

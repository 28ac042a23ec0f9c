"""Prompt lookup on the host: which tokens may follow a request's known ones, because they did where
the last of these stood before, in its prompt or output.

The index is that of LZ77 compressors, hash chains (RFC 1951, section 4): a table has the last place
behind each pair of tokens, by hash, and each place has the one before it. A lookup compares the
text before a few of these places. A match is followed as long as tokens confirm it, without another
lookup. So each token costs a constant time, and the newest tokens alone take memory.
"""

from array import array
from collections.abc import Sequence
from typing import Final

import numpy as np
from numpy.typing import NDArray

WINDOW: Final = 1 << 15
"""Tokens that are indexed at least, the newest ones. Twice as many are kept at most."""
MIN_MATCH: Final = 2
"""Number of last tokens that must have stood before."""
MAX_MATCH: Final = 16
"""Length beyond which a longer match counts no more."""
MAX_CHAIN: Final = 8
"""Places that a lookup compares at most, the last ones."""
NOWHERE: Final = -1
_BITS: Final = 16
"""Bits of a hash at most: NumPy sorts keys of 16 bits in linear time."""
_FACTORS: Final = (0x2C1B3C6D, 0x297A2D39)
"""Multipliers, odd and below 2**30, so that the sum of products stays below 2**62."""
_SHIFT: Final = 14


class PromptLookup:
    """The tokens of one request, and where each pair of them stood. Owned by its MaskedRow, on the
    driver's thread; up to 1 MiB of host memory, less for shorter texts."""

    def __init__(self, tokens: NDArray[np.int32]) -> None:
        """tokens: int32 [n], all that are known."""
        self._index(tokens)

    def _index(self, tokens: NDArray[np.int32]) -> None:
        """Index the newest tokens."""
        tokens = tokens[-WINDOW:].astype(np.int32)
        num_bits = min(_BITS, max(8, 1 + int(tokens.size).bit_length()))
        self._mask = (1 << num_bits) - 1
        self._most = min(2 * WINDOW, 2 << num_bits)
        last = np.full(1 << num_bits, NOWHERE, np.int32)
        previous = np.full(tokens.size + 1, NOWHERE, np.int32)
        if tokens.size >= MIN_MATCH:
            first, second = tokens[:-1].astype(np.int64), tokens[1:].astype(np.int64)
            hashes = (first * _FACTORS[0] + second * _FACTORS[1]) >> _SHIFT
            keys = (hashes & self._mask).astype(np.uint16)
            places = np.arange(MIN_MATCH, tokens.size + 1, dtype=np.int32)
            order = np.argsort(keys, kind="stable")
            sorted_keys, sorted_places = keys[order], places[order]
            goes_on = sorted_keys[1:] == sorted_keys[:-1]
            previous[sorted_places[1:][goes_on]] = sorted_places[:-1][goes_on]
            is_last = np.append(~goes_on, True)
            last[sorted_keys[is_last]] = sorted_places[is_last]
        self._tokens = array("i", tokens.tobytes())
        self._last = array("i", last.tobytes())
        """For each hash of two tokens, the place behind the last such pair: that of the token which
        followed it."""
        self._previous = array("i", previous.tobytes())
        """For each place, the one before it with the same hash."""
        self._next = NOWHERE
        """Place of the token that should come next, while a match is followed."""

    def extend(self, new: Sequence[int]) -> None:
        """Append tokens."""
        tokens, last, previous = self._tokens, self._last, self._previous
        for token in new:
            place = self._next
            self._next = place + 1 if place >= 0 and tokens[place] == token else NOWHERE
            tokens.append(token)
            number = NOWHERE
            if len(tokens) >= MIN_MATCH:
                key = self._key(tokens[-2], token)
                number, last[key] = last[key], len(tokens)
            previous.append(number)
        if len(tokens) > self._most:
            self._index(np.frombuffer(tokens, np.int32).copy())

    def following(self, ahead: Sequence[int], count: int) -> list[int]:
        """Return `count` tokens that may follow the text and, behind it, the tokens `ahead`; none
        without a match in the text. Those that pass the end of all these begin again at the
        match."""
        place = self._find(ahead)
        if place == NOWHERE:
            return []
        text = [*self._tokens[place : place + count], *ahead]
        while len(text) < count:
            text += text[: count - len(text)]
        return text[:count]

    def _find(self, ahead: Sequence[int]) -> int:
        """Return the place behind the best match; NOWHERE without one."""
        tokens = self._tokens
        if ahead:
            return self._search([*tokens[-MAX_MATCH:], *ahead][-MAX_MATCH:], len(tokens))
        if self._next == NOWHERE:
            self._next = self._search(tokens[-MAX_MATCH:].tolist(), len(tokens) - 1)
        return self._next

    def _search(self, tail: Sequence[int], most: int) -> int:
        """Return the place behind the longest match of the last tokens, of equal ones the last.
        most: the last place that counts."""
        if len(tail) < MIN_MATCH:
            return NOWHERE
        tokens, best, longest = self._tokens, NOWHERE, MIN_MATCH - 1
        place = self._last[self._key(tail[-2], tail[-1])]
        if place > most:  # the text's own end
            place = self._previous[place]
        for _ in range(MAX_CHAIN):
            if place == NOWHERE:
                break
            length, end = 0, min(len(tail), place)
            while length < end and tokens[place - 1 - length] == tail[-1 - length]:
                length += 1
            if length > longest:
                best, longest = place, length
                if length == len(tail):
                    break
            place = self._previous[place]
        return best

    def _key(self, first: int, second: int) -> int:
        return (first * _FACTORS[0] + second * _FACTORS[1]) >> _SHIFT & self._mask

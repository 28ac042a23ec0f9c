"""A request's rules on tokens: penalties, biases, allowed tokens and bad words. Four extensions,
each with a check against the vocabulary.

Token ids travel as raw little-endian int32. Rules act in this order: allowed tokens, bad words,
biases, penalties; the ban of stop tokens before min_tokens comes between the last two.
"""

import struct
from collections.abc import Iterable, Mapping, Sequence
from itertools import pairwise
from typing import Annotated, Final, NamedTuple

from msgspec import Meta

from rpc_schema.base import Count, Extension

MAX_PENALTY: Final = 2.0
"""Largest presence or frequency penalty; the smallest is its negative."""

MIN_REPETITION_PENALTY: Final = 0.01
MAX_REPETITION_PENALTY: Final = 100.0

MAX_BIASED_TOKENS: Final = 1024
MAX_BIAS: Final = 100.0
"""Largest bias; the smallest is its negative."""

MAX_ALLOWED_TOKENS: Final = 4096
MAX_BAD_WORDS: Final = 256
MAX_BAD_WORD_TOKENS: Final = 16
"""Tokens of one bad word."""

MAX_TOKEN_COUNT: Final = 2**15 - 1
"""Maximum occurrences of a token that its frequency penalty counts."""

_INT32: Final = 4

Penalty = Annotated[float, Meta(ge=-MAX_PENALTY, le=MAX_PENALTY)]
RepetitionPenalty = Annotated[float, Meta(ge=MIN_REPETITION_PENALTY, le=MAX_REPETITION_PENALTY)]
Bias = Annotated[float, Meta(ge=-MAX_BIAS, le=MAX_BIAS)]
BiasedTokens = Annotated[dict[Count, Bias], Meta(max_length=MAX_BIASED_TOKENS)]
AllowedTokenIds = Annotated[tuple[Count, ...], Meta(min_length=1, max_length=MAX_ALLOWED_TOKENS)]
BadWord = Annotated[tuple[Count, ...], Meta(min_length=1, max_length=MAX_BAD_WORD_TOKENS)]
BadWordList = Annotated[tuple[BadWord, ...], Meta(max_length=MAX_BAD_WORDS)]


class RuleFault(NamedTuple):
    """A reason to refuse an extension."""

    field: str
    """Name of the field in an input line."""
    value: object
    fix: str


class Penalties(Extension, frozen=True, tag=20, kw_only=True):
    """Penalties on tokens that the request already has."""

    presence_penalty: Penalty = 0.0
    """Subtracted from the logit of each token that is in the output."""
    frequency_penalty: Penalty = 0.0
    """Subtracted once for each occurrence of the token in the output."""
    repetition_penalty: RepetitionPenalty = 1.0
    """For tokens in the prompt or the output: divides positive logits and multiplies negative ones.
    Applied before the other two."""


class LogitBias(Extension, frozen=True, tag=21, kw_only=True):
    """Biases that are added to the logits of some tokens."""

    token_ids: Annotated[bytes, Meta(max_length=_INT32 * MAX_BIASED_TOKENS)]
    """int32, each once."""
    biases: Annotated[bytes, Meta(max_length=_INT32 * MAX_BIASED_TOKENS)]
    """float32, one for each of token_ids."""

    @classmethod
    def of(cls, biases: Mapping[int, float]) -> "LogitBias":
        """Return the extension for biases, given by token id."""
        values = struct.pack(f"<{len(biases)}f", *biases.values())
        return cls(token_ids=pack_token_ids(biases), biases=values)

    @property
    def values(self) -> tuple[float, ...]:
        """Return the biases."""
        return struct.unpack(f"<{len(self.biases) // _INT32}f", self.biases)

    def find_fault(self, vocab_size: int) -> RuleFault | None:
        """Return the first fault."""
        field = "logit_bias"
        fault = column_fault(field, self.token_ids, vocab_size)
        if fault is not None:
            return fault
        if len(self.biases) != len(self.token_ids):
            return RuleFault(field, f"{len(self.biases)} bytes", "give one float32 for each token")
        wrong = [bias for bias in self.values if not abs(bias) <= MAX_BIAS]
        if wrong:
            return RuleFault(field, wrong[0], f"use biases from {-MAX_BIAS} to {MAX_BIAS}")
        token_ids = unpack_token_ids(self.token_ids)
        if len(set(token_ids)) < len(token_ids):
            return RuleFault(field, _first_twice(token_ids), "name each token once")
        return None


class AllowedTokens(Extension, frozen=True, tag=22, kw_only=True):
    """The only tokens that the request may sample."""

    token_ids: Annotated[bytes, Meta(max_length=_INT32 * MAX_ALLOWED_TOKENS)]
    """int32, at least one."""

    def find_fault(self, vocab_size: int) -> RuleFault | None:
        """Return the first fault."""
        return column_fault("allowed_token_ids", self.token_ids, vocab_size)


class BadWords(Extension, frozen=True, tag=23, kw_only=True):
    """Sequences of tokens that the request never completes: the last token of each is banned when
    the request's newest tokens, prompt included, are the ones before it."""

    lengths: Annotated[bytes, Meta(max_length=MAX_BAD_WORDS)]
    """uint8, the length of each sequence in tokens."""
    token_ids: Annotated[bytes, Meta(max_length=_INT32 * MAX_BAD_WORDS * MAX_BAD_WORD_TOKENS)]
    """int32, all sequences concatenated."""

    @classmethod
    def of(cls, words: Sequence[Sequence[int]]) -> "BadWords":
        """Return the extension for these sequences."""
        token_ids = pack_token_ids([token for word in words for token in word])
        return cls(lengths=bytes(map(len, words)), token_ids=token_ids)

    @property
    def words(self) -> tuple[tuple[int, ...], ...]:
        """Return the sequences."""
        token_ids, words, first = unpack_token_ids(self.token_ids), [], 0
        for length in self.lengths:
            words.append(token_ids[first : first + length])
            first += length
        return tuple(words)

    def find_fault(self, vocab_size: int) -> RuleFault | None:
        """Return the first fault."""
        field = "bad_words"
        wrong = [n for n in self.lengths if not 1 <= n <= MAX_BAD_WORD_TOKENS]
        if wrong:
            fix = f"use sequences of 1 to {MAX_BAD_WORD_TOKENS} tokens"
            return RuleFault(field, f"{wrong[0]} tokens", fix)
        if len(self.token_ids) != _INT32 * sum(self.lengths):
            fix = f"send {sum(self.lengths)} int32 values, as the lengths say"
            return RuleFault(field, f"{len(self.token_ids)} bytes", fix)
        return column_fault(field, self.token_ids, vocab_size)


TokenRule = Penalties | LogitBias | AllowedTokens | BadWords


def pack_token_ids(token_ids: Iterable[int]) -> bytes:
    """Return token ids, each below 2^31, as a column."""
    listed = tuple(token_ids)
    return struct.pack(f"<{len(listed)}i", *listed)


def unpack_token_ids(column: bytes) -> tuple[int, ...]:
    """Return the token ids of a column."""
    return struct.unpack(f"<{len(column) // _INT32}i", column)


def column_fault(field: str, column: bytes, vocab_size: int) -> RuleFault | None:
    """Return what is wrong with a column of token ids, which must have at least one."""
    if not column or len(column) % _INT32:
        return RuleFault(field, f"{len(column)} bytes", "give at least one token id, each as int32")
    token_ids = unpack_token_ids(column)
    low, high = min(token_ids), max(token_ids)
    if low < 0 or high >= vocab_size:
        wrong = low if low < 0 else high
        return RuleFault(field, wrong, f"use token ids from 0 to {vocab_size - 1}")
    return None


def _first_twice(token_ids: Sequence[int]) -> int:
    ordered = sorted(token_ids)
    return next(token for token, later in pairwise(ordered) if token == later)

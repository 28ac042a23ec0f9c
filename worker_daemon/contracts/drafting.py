"""The interface of looking drafts up in tokens on the device, which kernels and plain torch
implement.

Shapes: S request rows, W tokens of a row's text, Q sequences that sampled, K drafts of each; P
pages of kept tokens.
"""

from dataclasses import dataclass
from typing import Final, NamedTuple, Protocol

from torch import Tensor

PAGE_TOKENS: Final = 32
"""Tokens of a page: as many as a row can gain in a step, and as a search compares."""
MAX_VOTES: Final = 32
"""Places of a text's last tokens that vote on what follows."""


@dataclass(frozen=True, slots=True)
class TextTable:
    """The tokens of the request rows and of the spare row."""

    tokens: Tensor
    """int32 [S + 1, W]; each step writes those that it reads."""
    lengths: Tensor
    """int32 [S + 1]: tokens of each row that count, as of the last call that says so: of place or
    append."""
    scratch: Tensor
    """int64 [2, S + 1]: zeros between the calls that use it."""


@dataclass(frozen=True, slots=True)
class KeptTable:
    """Outputs of all requests, the newest ones. A request fills pages of its own, so that those
    that run side by side do not mix. Pages are numbered as they are begun; page n is at index n %
    P, until page n + P takes its place."""

    tokens: Tensor
    """int32 [P, PAGE_TOKENS]; -1 where the page has no token yet."""
    owners: Tensor
    """int32 [P]: the request that filled the page."""
    before: Tensor
    """int64 [P]: number of the request's previous page, which may be gone; -1 if there is none."""
    after: Tensor
    """int64 [P]: number of the request's next page, or -1."""
    clock: Tensor
    """int64 [1]: the number of the next page that is begun."""
    writing: Tensor
    """int64 [S + 1]: number of the page that a row fills, which may be gone; -1 if there is
    none."""
    filled: Tensor
    """int32 [S + 1]: tokens of that page."""
    ends: Tensor
    """int32 [S + 1]: tokens of each row's text that are kept, or need not be."""
    requests: Tensor
    """int32 [S + 1]: the request of each row; 0 for none, of which nothing is kept."""


class Matching(NamedTuple):
    """Bounds of a search for a text's last tokens in its earlier ones."""

    longest: int
    """Tokens that are compared, 1 to 32."""
    shortest: int
    """Fewest tokens that must be equal, 1 to longest."""
    num_drafts: int
    """K"""


class TextKernels(Protocol):
    """Operations on the rows' texts. They never wait for the device; all implementations give the
    same result. rows are int32 and name each row at most once, but a row that has no text and gains
    nothing any number of times: padding."""

    def place(self, table: TextTable, rows: Tensor, bounds: Tensor, tokens: Tensor) -> None:
        """Replace the texts of rows [B]: row b gets tokens[bounds[b] : bounds[b + 1]]. bounds int32
        [B + 1], tokens int32; at most W for each row."""

    def append(
        self, table: TextTable, rows: Tensor, token_ids: Tensor, counts: Tensor, lengths: Tensor
    ) -> None:
        """Append the first counts (int32 [Q]) of token_ids (int64 [Q, 1 + K]) to the texts of rows
        [Q], which have lengths (int32 [Q]) then; nothing if the first one is negative. Tokens that
        find no room are dropped."""

    def continue_texts(self, table: TextTable, rows: Tensor, matching: Matching) -> Tensor:
        """Return int64 [Q, K]: the tokens that followed the last ones of each row's text where
        these stood before; 0 if they did not.

        The place with the longest match counts, up to `longest` tokens, and among equals the last
        one. After the text's end, the tokens that followed are repeated.
        """

    def keep(
        self, table: TextTable, kept: KeptTable, rows: Tensor, ends: Tensor | None = None
    ) -> None:
        """Keep the texts of rows [Q] up to ends (int32 [Q]; None: up to their lengths) as output of
        their requests, from where they are not kept yet, at most PAGE_TOKENS of each. Rows begin
        pages in the order of Q."""

    def vote(self, table: TextTable, kept: KeptTable, rows: Tensor, matching: Matching) -> Tensor:
        """Return int64 [Q, K]: the tokens that most often followed the last ones of each row's
        text, in that text and in the kept output of other requests; 0 from the first place on for
        which there is none.

        MAX_VOTES places vote, of all those with a match: the ones with the longest match, up to
        `longest` tokens; among equals those in the text, and then the last ones. For each draft,
        the places vote whose last tokens still match the text and its drafts at the greatest
        length, at least `shortest`; among tokens with equal votes, that of the first place in this
        order is taken. At the text's end, a place in it repeats the tokens after it.
        """

"""A request with a grammar in a driver's steps: its matcher, what steps in flight sample for it,
and the masks of its newest sampling.

A sampling with k drafts needs k + 1 masks: one at its place, and one behind each draft. Masks of
forced tokens follow from these. Behind other drafts, which are guesses, a copy of the matcher makes
each mask. The matcher itself takes no token that was not sampled. After a step, the copy behind its
last accepted guess replaces it.
"""

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from hashlib import blake2b
from itertools import islice
from typing import Final, NamedTuple, Protocol, TypeAlias

import numpy as np
from numpy.typing import NDArray

from rpc_schema.step import NO_TOKEN
from rpc_schema.structured import StructuredOutput
from worker_client.structured.matchers import GrammarMatcher, is_allowed
from worker_client.structured.prompt_lookup import PromptLookup

Int32s: TypeAlias = NDArray[np.int32]

State: TypeAlias = int | tuple[StructuredOutput, bytes]
"""State on which a mask depends. It is a token, the only one that is allowed (NO_TOKEN: none is),
or a grammar and the digest of the tokens before."""


class PlacedMask(NamedTuple):
    """A mask of a sampling."""

    state: State
    words: Int32s | None = None
    """int32 [W]; None if the state is a token."""


class ExpectedTokens(NamedTuple):
    """Tokens that may follow those which steps in flight are expected to gain."""

    token_ids: list[int]
    num_forced: int = 0
    """Number of leading ones that its grammar forces; the others are guesses."""


NONE_EXPECTED: Final = ExpectedTokens([])


class Forking(Protocol):
    """Source of matchers."""

    def fork(self, matcher: GrammarMatcher, tokens: Sequence[int]) -> GrammarMatcher:
        """Return a matcher that goes on behind the forced tokens of one that is ready, and takes
        these; the other one stays as it is. The new one fails if the grammar refuses them."""

    def end(self, matcher: GrammarMatcher) -> None:
        """Give up a matcher."""


@dataclass(slots=True, eq=False)
class RowSampling:
    """Tokens that a step in flight samples for a row."""

    drafts: Sequence[int] = ()
    num_forced: int = 0
    """Leading drafts that its grammar forces, once `guesses` is set."""
    guesses: list[GrammarMatcher] | None = None
    """For each draft behind the forced ones, a matcher that has taken those up to it; those behind
    one that cannot be next have none. None: they are not made yet."""

    @property
    def num_tokens(self) -> int:
        """Most tokens that the request gains."""
        return 1 + len(self.drafts)


@dataclass(slots=True, eq=False)
class MaskedRow:
    """A request with a grammar, from one admission to the next."""

    req_id: str
    grammar: StructuredOutput
    matcher: GrammarMatcher
    prompt: Int32s
    """int32 [num_prompt_tokens]."""
    tokens: list[int] = field(default_factory=list)
    """Generated tokens that are known and that the matcher has taken."""
    digest: bytes = b""
    """Digest of these."""
    num_left: int = field(kw_only=True)
    """Known tokens that no step has computed yet. The step that computes the last one samples."""
    may_jump: bool = field(kw_only=True)
    """Its output is the same if forced tokens are not sampled."""
    in_flight: deque[RowSampling] = field(default_factory=deque)
    """Samplings whose results are not here yet, oldest first."""
    jumped: list[int] = field(default_factory=list)
    """Tokens that it has gained by a jump, without those whose results are here: the steps in
    flight sample the first ones. The next admission replaces the row."""

    is_void: bool = False
    """Its request gets nothing that its steps still sample. Their masks allow no token: workers
    must not keep one for a driver that adopts the request."""
    lookup: PromptLookup | None = None
    """Index of prompt and tokens; None until guesses are wanted."""

    @property
    def num_unknown(self) -> int:
        """Most tokens that steps in flight sample, and whose results are not here."""
        return sum(each.num_tokens for each in self.in_flight)

    @property
    def has_drafts(self) -> bool:
        """True if a step in flight has drafts of it."""
        return any(each.drafts for each in self.in_flight)

    @property
    def has_placed(self) -> bool:
        """True if the masks of a step in flight follow from tokens that earlier ones were to
        gain."""
        return any(each.guesses is not None for each in self.in_flight)

    @property
    def is_known(self) -> bool:
        """True if its next mask is known, or its matcher has failed."""
        return bool(self.jumped) or self.matcher.is_ready

    @property
    def is_placed(self) -> bool:
        """True if the tokens before its newest sampling are known, or follow from its grammar."""
        return bool(self.jumped) or self._num_ahead() is not None

    @property
    def is_overdue(self) -> bool:
        """True if requests should not wait for its masks any longer in this step."""
        late = [each for each in (self.matcher, *self._guesses()) if not each.is_ready]
        return all(each.is_overdue for each in late)

    def expected_next(self, most: int) -> ExpectedTokens:
        """Return up to so many tokens for the next step to have as drafts: those that the grammar
        forces, and behind them what followed the same tokens before, in prompt or output."""
        if self.jumped:
            return NONE_EXPECTED
        forced = list(self.matcher.forced) if self.matcher.is_ready else []
        following = list(forced)
        num_wanted = self.num_unknown + most - len(forced)
        if num_wanted > 0:
            if self.lookup is None:
                self.lookup = PromptLookup(np.append(self.prompt, np.array(self.tokens, np.int32)))
            following += self.lookup.following(forced, num_wanted)
        begin = 0
        for each in self.in_flight:  # it gains one token more than are accepted
            begin += 1 + _num_equal(each.drafts, following[begin:])
        return ExpectedTokens(following[begin : begin + most], max(0, len(forced) - begin))

    def waits_for_jump(self, most: int, num_saved: float) -> bool:
        """Return True if its next step should have no drafts, so that it can jump over the tokens
        that its grammar forces: a jump must save at least so many steps with `most` drafts."""
        num_left = len(self.matcher.forced) - self.num_unknown
        return self.may_jump and self.has_drafts and num_left > (1 + most) * num_saved

    def prepare(self, grammars: Forking) -> bool:
        """Make the matchers that its newest sampling needs, once they can be made. Return True if
        its masks are known, or the matcher has failed."""
        if self.jumped or self.is_void:
            return True
        ahead = self._num_ahead()
        if ahead is None or not self.matcher.is_ready:
            return False
        sampling = self.in_flight[-1]
        if sampling.guesses is None:
            self._guess(sampling, ahead, grammars)
        return all(each.is_ready for each in self._guesses())

    def masks(self) -> list[PlacedMask]:
        """Return the masks of its newest sampling, which is prepared. They allow no token if the
        row is void, or the matcher has failed; nor behind a draft that the grammar refuses, where
        none can be gained."""
        if self.jumped and not self.is_void:
            return [PlacedMask(self.jumped[self.num_unknown - 1])]
        sampling, forced, ahead = self.in_flight[-1], self.matcher.forced, self._num_ahead()
        if self.is_void or ahead is None or self.matcher.error:
            return [PlacedMask(NO_TOKEN)] * sampling.num_tokens
        found: list[PlacedMask] = []
        for token in islice(forced, ahead, ahead + sampling.num_forced + 1):
            found.append(PlacedMask(token))
        if ahead + sampling.num_forced == len(forced):
            digest = _extended(self.digest, forced)
            found.append(PlacedMask((self.grammar, digest), self.matcher.mask))
            for guess, token in zip(
                self._guesses(), sampling.drafts[sampling.num_forced :], strict=False
            ):
                if guess.error:
                    break
                digest = _extended(digest, [token])
                is_forced = bool(guess.forced)
                found.append(
                    PlacedMask(guess.forced[0])
                    if is_forced
                    else PlacedMask((self.grammar, digest), guess.mask)
                )
        num_missing = sampling.num_tokens - len(found)
        return found + [PlacedMask(NO_TOKEN)] * num_missing

    def accept(self, sampling: RowSampling, num_accepted: int, grammars: Forking) -> int:
        """Go on from the matcher behind the last accepted guess, if there is one; return how many
        of the sampling's tokens that has taken. The others are given up."""
        num_guessed, guesses = num_accepted - sampling.num_forced, sampling.guesses or []
        sampling.guesses = []
        is_ahead = 0 < num_guessed <= len(guesses)
        if is_ahead:
            self.matcher, guesses[num_guessed - 1] = guesses[num_guessed - 1], self.matcher
        for guess in guesses:
            grammars.end(guess)
        return num_accepted if is_ahead else 0

    def note(self, tokens: Sequence[int]) -> None:
        """Append tokens that the matcher has taken."""
        self.tokens += tokens
        self.digest = _extended(self.digest, tokens)
        if self.lookup is not None:
            self.lookup.extend(tokens)

    def drop_guesses(self, grammars: Forking) -> None:
        """Give up the matchers of steps in flight."""
        for sampling in self.in_flight:
            for guess in sampling.guesses or ():
                grammars.end(guess)
            sampling.guesses = []

    def end(self, grammars: Forking) -> None:
        """Give up all its matchers."""
        self.drop_guesses(grammars)
        grammars.end(self.matcher)

    def _guesses(self) -> Sequence[GrammarMatcher]:
        return (self.in_flight[-1].guesses or ()) if self.in_flight else ()

    def _num_ahead(self) -> int | None:
        """Return how many tokens earlier steps in flight sample, which the grammar forces; None if
        it leaves them a choice."""
        if len(self.in_flight) < 2:
            return 0
        forced, ahead = self.matcher.forced, 0
        for each in islice(self.in_flight, len(self.in_flight) - 1):
            if [*each.drafts] != [*islice(forced, ahead, ahead + len(each.drafts))]:
                return None
            ahead += each.num_tokens
        return ahead if ahead <= len(forced) else None

    def _guess(self, sampling: RowSampling, ahead: int, grammars: Forking) -> None:
        forced, drafts = list(islice(self.matcher.forced, ahead, None)), sampling.drafts
        sampling.guesses = []
        sampling.num_forced = num_forced = _num_equal(drafts, forced)
        mask, guesses = self.matcher.mask, drafts[num_forced:]
        if num_forced < len(forced) or not guesses or mask is None:
            return
        if not is_allowed(mask, guesses[0]):
            return
        for count in range(1, len(guesses) + 1):
            sampling.guesses.append(grammars.fork(self.matcher, guesses[:count]))


def _num_equal(one: Sequence[int], other: Sequence[int]) -> int:
    """Return how many leading tokens are the same."""
    pairs = enumerate(zip(one, other, strict=False))
    return next((i for i, (a, b) in pairs if a != b), min(len(one), len(other)))


def _extended(digest: bytes, tokens: Sequence[int]) -> bytes:
    for token in tokens:  # one by one: equal however they came
        content = token.to_bytes(4, "little")
        digest = blake2b(content, key=digest, digest_size=16).digest()
    return digest

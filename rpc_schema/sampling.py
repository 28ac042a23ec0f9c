"""Sampling, stop tokens and logprobs of one request: its extensions, and the types of their values.
The rules on tokens are in rpc_schema/token_rules.py."""

from typing import Annotated, TypeAlias

from msgspec import Meta

from rpc_schema.base import (
    Count,
    Extension,
    Fraction,
    FramedExtension,
    Name,
    RawInt32,
    RawUInt16,
    Unsigned,
)
from rpc_schema.token_rules import RuleFault, TokenRule, column_fault

MAX_LOGPROBS = 20

MAX_LOGPROB_TOKEN_IDS = 128

MAX_LOGITS_PROCESSORS = 8
"""Bound for one request."""

MAX_PROMPT_LOGPROBS_TOKENS = 65_536
"""Bound on max_num_batched_tokens if requests want log probabilities of their prompts: a step's
must fit into its reply."""

MAX_STOP_TOKEN_IDS = 1024
"""Bound for one request, including the model's end-of-sequence tokens."""

MIN_TEMPERATURE = 1e-5
"""Logits divided by less than this may exceed float32."""

Temperature = Annotated[float, Meta(ge=0.0, le=1e6)]
TopP = Annotated[float, Meta(ge=1e-6, le=1.0)]
NumLogprobs = Annotated[int, Meta(ge=0, le=MAX_LOGPROBS)]
LogprobTokenIds = Annotated[tuple[Count, ...], Meta(min_length=1, max_length=MAX_LOGPROB_TOKEN_IDS)]
ProcessorNames = Annotated[tuple[Name, ...], Meta(max_length=MAX_LOGITS_PROCESSORS)]


class RandomSampling(Extension, frozen=True, tag=1, kw_only=True):
    """Random sampling of a request's tokens; without it, workers take the most likely ones. The
    same (seed, position, logits) gives the same token in any batch and any parallel shape."""

    temperature: Temperature = 0.0
    """At least MIN_TEMPERATURE, or 0, which also takes the most likely token."""
    top_k: Count = 0
    """Keep the k most likely tokens; 0 keeps all."""
    top_p: TopP = 1.0
    min_p: Fraction = 0.0
    seed: Unsigned = 0
    """Chosen by the client if the caller gave none."""


class StopTokens(Extension, frozen=True, tag=2, kw_only=True):
    """The tokens that end a request. The driver ends it; workers keep them for another driver, and
    sample none of them before min_tokens."""

    token_ids: Annotated[tuple[Count, ...], Meta(max_length=MAX_STOP_TOKEN_IDS)] = ()
    """End of sequence included."""
    min_tokens: Count = 0
    """Output tokens before which none of them is sampled."""


class LogprobsWanted(Extension, frozen=True, tag=3, kw_only=True):
    """A request reports the log probability of each sampled token and of the most likely ones."""

    count: NumLogprobs
    """Most likely tokens to report in addition to the sampled one."""


class TokenLogprobs(FramedExtension, frozen=True, tag=1, kw_only=True):
    """Log probabilities of all of a reply's rows. Three frames: int32 token ids [rows, width + 1]
    (the sampled token first), their float32 log probabilities, and the int32 rank [rows] of the
    sampled token (1 = most likely). Computed from the logits after grammar masks, before bans,
    temperature and filters."""

    width: NumLogprobs
    """Largest width that a row asked for."""

    @property
    def num_frames(self) -> int:
        return 3


class FullLogprobsWanted(Extension, frozen=True, tag=27, kw_only=True):
    """A request reports two log probabilities of each sampled token: see FullLogprobs."""


class FullLogprobs(FramedExtension, frozen=True, tag=22, kw_only=True):
    """Two log probabilities of the sampled token of each of a reply's rows. Two frames, each
    float32 [rows]. The first is that of the model alone: from the softmax of the unmodified logits
    over the whole vocabulary. The second is that of the distribution that the token was drawn from:
    after grammar masks, rules, temperature and filters; 0 at temperature 0. Rows that did not ask
    have zeros."""

    @property
    def num_frames(self) -> int:
        return 2


class TraceWanted(Extension, frozen=True, tag=28, kw_only=True):
    """A request brings tokens of its output, and reports both log probabilities of each
    (FullLogprobs), as if it had sampled them. The KV that their steps compute must begin before
    them: at the last token of the prompt or earlier."""

    num_tokens: Count
    """So many of its first output tokens: its admission has them."""
    last_token_id: Annotated[int, Meta(ge=-1, le=2**31 - 1)] = -1
    """A token behind these, which the admission does not have; -1: there is none. The driver ends
    the request with it, whatever is sampled in its place."""


class TraceLogprobs(FramedExtension, frozen=True, tag=23, kw_only=True):
    """Both log probabilities of tokens that requests have brought (TraceWanted), for the chunks
    that the step computed. Two frames, each float32 [tokens], as those of FullLogprobs. A token
    that the request could not have sampled has -inf in the second."""

    req_ids: Annotated[tuple[Name, ...], Meta(max_length=65535)]
    """Requests with a chunk."""
    spans: RawInt32
    """Pairs (first, count), one for each of req_ids: positions of its tokens in the frames."""

    @property
    def num_frames(self) -> int:
        return 2


class LogprobTokens(Extension, frozen=True, tag=24, kw_only=True):
    """A request reports the log probabilities of these tokens at each position that it samples."""

    token_ids: Annotated[bytes, Meta(max_length=4 * MAX_LOGPROB_TOKEN_IDS)]
    """int32, at least one."""

    def find_fault(self, vocab_size: int) -> RuleFault | None:
        """Return the first fault."""
        return column_fault("logprob_token_ids", self.token_ids, vocab_size)


class LogitsProcessors(Extension, frozen=True, tag=26, kw_only=True):
    """Custom logits processors of a request: names from the configuration, which act in its order.
    The daemons have their code."""

    names: Annotated[tuple[Name, ...], Meta(min_length=1, max_length=MAX_LOGITS_PROCESSORS)]

    def find_fault(self, known: tuple[str, ...]) -> RuleFault | None:
        """Return the first fault. known: the names of the configuration."""
        unknown = [name for name in self.names if name not in known]
        if unknown:
            names = ", ".join(known) or "none: load with scheduler.logits_processors"
            return RuleFault("logits_processors", unknown[0], f"use one of those loaded: {names}")
        return None


class GivenLogprobs(FramedExtension, frozen=True, tag=20, kw_only=True):
    """Log probabilities of the tokens that requests have named (LogprobTokens), of all of a reply's
    rows. One frame: float32 [rows, width], each row's own first. Computed from the same logits as
    TokenLogprobs."""

    width: Annotated[int, Meta(ge=1, le=MAX_LOGPROB_TOKEN_IDS)]
    """Largest number of tokens that a row named."""

    @property
    def num_frames(self) -> int:
        return 1


class PromptLogprobsWanted(Extension, frozen=True, tag=25, kw_only=True):
    """A request reports the log probability of each token of its prompt except the first, and of
    the most likely tokens at the same position. Its prompt must be computed from the first token
    on."""

    count: NumLogprobs
    """Most likely tokens to report in addition to the prompt's."""


class PromptLogprobs(FramedExtension, frozen=True, tag=21, kw_only=True):
    """Log probabilities of prompt tokens, for the chunks that the step computed. Three frames:
    int32 token ids [tokens, width + 1] (the prompt's token first), their float32 log probabilities,
    and the int32 rank [tokens] of the prompt's token. Computed from the unmodified logits."""

    width: NumLogprobs
    """Largest width that a request asked for."""
    req_ids: Annotated[tuple[Name, ...], Meta(max_length=65535)]
    """Requests with a chunk."""
    spans: RawInt32
    """Pairs (first, count), one for each of req_ids: prompt positions of its tokens in the
    frames."""

    @property
    def num_frames(self) -> int:
        return 3


class GrammarMasks(FramedExtension, frozen=True, tag=1, kw_only=True):
    """Tokens that some rows of a step may sample. One frame: int32 [masks, ceil(vocab_size / 32)],
    bit 1 = allowed; slots may share a mask. A slot whose mask allows none gets NO_TOKEN."""

    slots: RawUInt16
    """Slots with a mask. Slots that sample nothing are skipped. A slot that samples several tokens
    may be named for each: its masks, in their order, are those of its newest samples."""
    indices: RawUInt16
    """For each of slots, the row of the frame that is its mask. There are no more masks than
    slots."""

    @property
    def num_frames(self) -> int:
        return 1


SamplingExtension: TypeAlias = (
    RandomSampling
    | StopTokens
    | LogprobsWanted
    | FullLogprobsWanted
    | TraceWanted
    | TokenRule
    | LogprobTokens
    | PromptLogprobsWanted
    | LogitsProcessors
)

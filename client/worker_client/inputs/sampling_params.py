"""SamplingParams: all sampling options of a request in one value, and the extensions that carry
them to the workers."""

from collections.abc import Iterable, Sequence
from typing import Annotated, Any, Final

import msgspec
from msgspec import Meta

from rpc_schema.base import Count, Extension, Fraction, Unsigned
from rpc_schema.extensions import RequestExtension
from rpc_schema.sampling import (
    MAX_STOP_TOKEN_IDS,
    FullLogprobsWanted,
    LogitsProcessors,
    LogprobsWanted,
    LogprobTokenIds,
    LogprobTokens,
    NumLogprobs,
    ProcessorNames,
    PromptLogprobsWanted,
    RandomSampling,
    SamplingExtension,
    StopTokens,
    Temperature,
    TopP,
    TraceWanted,
)
from rpc_schema.structured import StructuredOutput
from rpc_schema.token_rules import (
    AllowedTokenIds,
    AllowedTokens,
    BadWordList,
    BadWords,
    BiasedTokens,
    LogitBias,
    Penalties,
    Penalty,
    RepetitionPenalty,
    TokenRule,
    pack_token_ids,
    unpack_token_ids,
)
from worker_client.errors import RequestError
from worker_client.inputs.stop_strings import MAX_STOP_STRINGS

MAX_SAMPLES: Final = 64
"""Bound on n."""

NumSamples = Annotated[int, Meta(ge=1, le=MAX_SAMPLES)]
StopString = Annotated[str, Meta(min_length=1)]
StopStrings = Annotated[tuple[StopString, ...], Meta(max_length=MAX_STOP_STRINGS)]


class SamplingParams(msgspec.Struct, frozen=True, kw_only=True):
    """Sampling options of a request, and what is reported and ends it. The names are those of
    vLLM's SamplingParams, which lacks full_logprobs; docs/sampling.md describes them. The types
    have the bounds, which request_checks.py checks."""

    n: NumSamples = 1
    """Samples to generate: see worker_client.requests.forked."""
    temperature: Temperature = 0.0
    """0 takes the most likely token; top_k, top_p, min_p and seed then have no effect."""
    top_p: TopP = 1.0
    top_k: Count = 0
    """0 keeps all tokens."""
    min_p: Fraction = 0.0
    seed: Unsigned | None = None
    """None: add_request gives the request a random one."""
    min_tokens: Count = 0
    ignore_eos: bool = False
    stop_token_ids: tuple[Count, ...] = ()
    stop: StopStrings = ()
    """Strings that end the request. The scheduler needs a tokenizer for them."""
    include_stop_str_in_output: bool = False
    """True if the text includes the stop string."""
    logprobs: NumLogprobs | None = None
    """None reports none."""
    full_logprobs: bool = False
    """True reports two log probabilities of each token: under the model alone, and in the
    distribution that it was drawn from."""
    prompt_logprobs: NumLogprobs | None = None
    """Like logprobs, for each token of the prompt except the first."""
    logprob_token_ids: LogprobTokenIds | None = None
    """Tokens whose log probabilities are reported with each token; None reports none."""
    presence_penalty: Penalty = 0.0
    frequency_penalty: Penalty = 0.0
    repetition_penalty: RepetitionPenalty = 1.0
    logit_bias: BiasedTokens = {}
    """Added to the logit of each token id."""
    allowed_token_ids: AllowedTokenIds | None = None
    """None allows all."""
    bad_words: BadWordList = ()
    """Sequences of token ids."""
    logits_processors: ProcessorNames = ()
    """Names of custom logits processors in the configuration."""
    structured_outputs: StructuredOutput | None = None
    """The grammar that the tokens follow."""

    @property
    def needs_seed(self) -> bool:
        """True if it draws tokens at random, and has no seed yet."""
        return self.seed is None and self.temperature > 0

    def stop_ids(self, eos_token_ids: Sequence[int]) -> tuple[int, ...]:
        """Return the tokens that end a request."""
        eos = () if self.ignore_eos else tuple(eos_token_ids)
        return tuple(dict.fromkeys((*eos, *self.stop_token_ids)))

    def extensions(self, eos_token_ids: Sequence[int] = ()) -> tuple[RequestExtension, ...]:
        """Return the extensions of a request, without those at their defaults.

        Raises:
            RequestError: it needs a seed, which worker_client.requests.seeded would give it, or it
                has more stop tokens than a request may have.
        """
        if self.needs_seed:
            raise no_seed()
        stop_ids = self.stop_ids(eos_token_ids)
        check_num_stop_ids(len(stop_ids))
        seed = self.seed if self.seed is not None and self.temperature else 0
        drawn = self.temperature, self.top_k, self.top_p, self.min_p, seed
        wanted: list[RequestExtension] = []
        if drawn != (0.0, 0, 1.0, 0.0, 0):
            temperature, top_k, top_p, min_p, seed = drawn
            wanted.append(
                RandomSampling(
                    temperature=temperature, top_k=top_k, top_p=top_p, min_p=min_p, seed=seed
                )
            )
        if stop_ids or self.min_tokens:
            wanted.append(StopTokens(token_ids=stop_ids, min_tokens=self.min_tokens))
        if self.logprobs is not None:
            wanted.append(LogprobsWanted(count=self.logprobs))
        if self.full_logprobs:
            wanted.append(FullLogprobsWanted())
        wanted += self._rules()
        if self.logprob_token_ids is not None:
            wanted.append(LogprobTokens(token_ids=pack_token_ids(self.logprob_token_ids)))
        if self.prompt_logprobs is not None:
            wanted.append(PromptLogprobsWanted(count=self.prompt_logprobs))
        if self.logits_processors:
            wanted.append(LogitsProcessors(names=self.logits_processors))
        if self.structured_outputs is not None:
            wanted.append(self.structured_outputs)
        return tuple(wanted)

    def _rules(self) -> list[TokenRule]:
        rules: list[TokenRule] = []
        penalties = self.presence_penalty, self.frequency_penalty, self.repetition_penalty
        if penalties != (0.0, 0.0, 1.0):
            presence, frequency, repetition = penalties
            rules.append(
                Penalties(
                    presence_penalty=presence,
                    frequency_penalty=frequency,
                    repetition_penalty=repetition,
                )
            )
        if self.logit_bias:
            rules.append(LogitBias.of(self.logit_bias))
        if self.allowed_token_ids is not None:
            rules.append(AllowedTokens(token_ids=pack_token_ids(self.allowed_token_ids)))
        if self.bad_words:
            rules.append(BadWords.of(self.bad_words))
        return rules

    @classmethod
    def of(cls, extensions: Iterable[Extension]) -> "SamplingParams":
        """Return the parameters that a request's extensions carry: the inverse of `extensions`."""
        values: dict[str, Any] = {}
        for extension in extensions:
            if isinstance(extension, SamplingExtension | StructuredOutput):
                values |= _params_of(extension)
        return cls(**values)


DEFAULT_SAMPLING: Final = SamplingParams()


def _params_of(extension: SamplingExtension | StructuredOutput) -> dict[str, Any]:
    """Return the fields of SamplingParams that an extension stands for."""
    params: dict[str, Any]
    match extension:
        case StopTokens():
            params = {"stop_token_ids": extension.token_ids, "min_tokens": extension.min_tokens}
        case LogprobsWanted():
            params = {"logprobs": extension.count}
        case FullLogprobsWanted():
            params = {"full_logprobs": True}
        case TraceWanted():
            params = {}  # it goes with tokens of the request
        case PromptLogprobsWanted():
            params = {"prompt_logprobs": extension.count}
        case LogitsProcessors():
            params = {"logits_processors": extension.names}
        case LogprobTokens():
            params = {"logprob_token_ids": unpack_token_ids(extension.token_ids)}
        case LogitBias():
            token_ids = unpack_token_ids(extension.token_ids)
            params = {"logit_bias": dict(zip(token_ids, extension.values, strict=True))}
        case AllowedTokens():
            params = {"allowed_token_ids": unpack_token_ids(extension.token_ids)}
        case BadWords():
            params = {"bad_words": extension.words}
        case StructuredOutput():
            params = {"structured_outputs": extension}
        case _:
            params = msgspec.structs.asdict(extension)
    return params


def check_num_stop_ids(count: int) -> None:
    """Raise RequestError for more stop tokens than a request may have."""
    if count > MAX_STOP_TOKEN_IDS:
        raise RequestError(
            "too many stop tokens, end of sequence included",
            field="sampling.stop_token_ids",
            value=count,
            fix=f"give at most {MAX_STOP_TOKEN_IDS}",
        )


def no_seed() -> RequestError:
    """Return the error of a request that needs a seed."""
    fix = "use seeded(request)"
    return RequestError("it has no seed yet", field="sampling.seed", value=None, fix=fix)

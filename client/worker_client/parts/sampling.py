"""The driver's side of random sampling, stop tokens and logprobs."""

from collections.abc import Mapping, Sequence

import numpy as np

from rpc_schema.codec import Frame
from rpc_schema.errors import BadFrameError
from rpc_schema.sampling import (
    MAX_STOP_TOKEN_IDS,
    MIN_TEMPERATURE,
    LogprobsWanted,
    RandomSampling,
    StopTokens,
    TokenLogprobs,
)
from worker_client.parts.interface import ExtensionFault, ModelBounds, RequestPart
from worker_client.scheduler_output import Logprobs


class RandomSamplingRequestPart(RequestPart):
    """Random sampling; the KV of a request does not depend on it."""

    extension = RandomSampling

    def find_fault(self, extension: RandomSampling, bounds: ModelBounds) -> ExtensionFault | None:
        if 0 < extension.temperature < MIN_TEMPERATURE:
            fix = f"use 0 for the most likely token, or at least {MIN_TEMPERATURE}"
            return ExtensionFault("temperature", extension.temperature, fix)
        return None


class StopTokensRequestPart(RequestPart):
    """Tokens that end a request, and are not sampled before its min_tokens."""

    extension = StopTokens

    def find_fault(self, extension: StopTokens, bounds: ModelBounds) -> ExtensionFault | None:
        token_ids = extension.token_ids
        if len(token_ids) > MAX_STOP_TOKEN_IDS:
            return ExtensionFault(
                "token_ids", f"{len(token_ids)} ids", f"give at most {MAX_STOP_TOKEN_IDS}"
            )
        unknown = [token_id for token_id in token_ids if token_id >= bounds.vocab_size]
        if unknown:
            return ExtensionFault(
                "token_ids", unknown[0], f"use token ids below {bounds.vocab_size}"
            )
        return None


class LogprobsPart(RequestPart):
    """Log probabilities of sampled tokens, as many for each request as it asked for."""

    extension = LogprobsWanted
    reply_extension = TokenLogprobs

    def find_fault(self, extension: LogprobsWanted, bounds: ModelBounds) -> ExtensionFault | None:
        if extension.count > bounds.vocab_size:
            return ExtensionFault("count", extension.count, f"use at most {bounds.vocab_size}")
        return None

    def read_reply(
        self,
        extension: TokenLogprobs,
        frames: Sequence[Frame],
        req_ids: Sequence[str],
        asked: Mapping[str, LogprobsWanted],
    ) -> Mapping[str, Logprobs]:
        rows, width = len(req_ids), extension.width
        if [len(frame) for frame in frames] != [4 * rows * (width + 1)] * 2 + [4 * rows]:
            raise BadFrameError(f"the logprobs of {rows} rows, {width} wide, have other frames")
        token_ids = np.frombuffer(frames[0], "<i4").reshape(rows, width + 1)
        logprobs = np.frombuffer(frames[1], "<f4").reshape(rows, width + 1)
        ranks = np.frombuffer(frames[2], "<i4").tolist()
        result = {}
        for row, req_id in enumerate(req_ids):
            if req_id in asked:
                end = asked[req_id].count + 1
                result[req_id] = Logprobs(token_ids[row, :end], logprobs[row, :end], ranks[row])
        return result

"""Log probabilities in the form of chats."""

from typing import Annotated, Any, Final

from msgspec import Meta

from worker_client.errors import request_error
from worker_client.inputs.tokenizer import Tokenizer
from worker_client.scheduler_output import FullLogprob, Logprobs
from worker_client.service.fields import BodyFields
from worker_client.service.token_texts import TokenTexts

MAX_TOP: Final = 20
LEAST: Final = -9999.0
"""Stands for minus infinity, which JSON does not have."""
NumTop = Annotated[int, Meta(ge=0, le=MAX_TOP)]


def take_logprobs(fields: BodyFields) -> int | None:
    """Return the number of most likely tokens that a body asks for beside each token; None if it
    asks for no log probabilities. Raises RequestError."""
    wanted: bool = fields.take("logprobs", bool, False)
    most: int | None = fields.take("top_logprobs", NumTop, None)
    if most and not wanted:
        fix = "give logprobs: true as well"
        raise request_error("top_logprobs", most, "log probabilities are not asked for", fix)
    return (most or 0) if wanted else None


class ChatLogprobs:
    """Makes the entries of tokens, each with the given number of most likely ones."""

    def __init__(self, tokenizer: Tokenizer, texts: TokenTexts, num_top: int) -> None:
        self._tokenizer = tokenizer
        self._texts = texts
        self._num_top = num_top

    def entry(self, reported: Logprobs, both: FullLogprob | None = None) -> dict[str, Any]:
        """Return the entry of a token. both: None if they are not asked for."""
        ids, values = reported.token_ids.tolist(), reported.logprobs.tolist()
        first, *top = map(self._one, ids, values)
        more = {} if both is None else {"logprob_full": both.full, "logprob_sampled": both.sampled}
        return {**first, **more, "top_logprobs": top[: self._num_top]}

    def _one(self, token_id: int, value: float) -> dict[str, Any]:
        return {
            "token": self._texts.text(token_id),
            "logprob": max(value, LEAST),
            "bytes": list(self._tokenizer.bytes_of(token_id)),
        }

"""Log probabilities in the form of OpenAI's completions."""

from collections.abc import Iterable, Sequence
from typing import Any

from worker_client.errors import request_error
from worker_client.scheduler_output import FullLogprob, Logprobs
from worker_client.service.fields import BodyFields
from worker_client.service.token_texts import TokenTexts


def take_full_logprobs(fields: BodyFields, *, has_logprobs: bool) -> bool:
    """Say whether a body asks for both log probabilities of each token. They are reported beside
    the others. Raises RequestError."""
    wanted: bool = fields.take("full_logprobs", bool, False)
    if wanted and not has_logprobs:
        fix = "give logprobs as well"
        raise request_error("full_logprobs", wanted, "log probabilities are not asked for", fix)
    return wanted


class CompletionLogprobs:
    """The `logprobs` objects of one choice, one after the other. Offsets count characters from the
    begin of the choice's text, as its tokens have them."""

    def __init__(self, texts: TokenTexts, num_top: int) -> None:
        """num_top: most likely tokens to report beside each token."""
        self._texts = texts
        self._num_top = num_top
        self._offset = 0

    def take(
        self,
        token_ids: Sequence[int],
        logprobs: Iterable[Logprobs | None],
        full: Sequence[FullLogprob] | None = None,
    ) -> dict[str, Any]:
        """Return the object of these tokens; None stands for a token that nothing is known of, as
        the first of a prompt. full: of the last tokens; None if they are not asked for."""
        tokens: list[str] = []
        offsets: list[int] = []
        own: list[float | None] = []
        top: list[dict[str, float] | None] = []
        for token_id, entry in zip(token_ids, logprobs, strict=True):
            tokens.append(self._texts.text(token_id))
            offsets.append(self._offset)
            self._offset += self._texts.num_shown(token_id)
            own.append(None if entry is None else float(entry.logprobs[0]))
            top.append(None if entry is None else self._top(entry))
        made = {
            "tokens": tokens,
            "token_logprobs": own,
            "top_logprobs": top,
            "text_offset": offsets,
        }
        if full is not None:
            unknown = [None] * (len(tokens) - len(full))
            made["token_logprobs_full"] = [*unknown, *(both.full for both in full)]
            made["token_logprobs_sampled"] = [*unknown, *(both.sampled for both in full)]
        return made

    def _top(self, entry: Logprobs) -> dict[str, float]:
        """Return the most likely tokens, and the token itself; of those with one text, the most
        likely."""
        found: dict[str, float] = {}
        ids, values = entry.token_ids.tolist(), entry.logprobs.tolist()
        for token_id, value in [*zip(ids, values, strict=True)][1 : 1 + self._num_top]:
            found.setdefault(self._texts.text(token_id), value)
        found.setdefault(self._texts.text(ids[0]), values[0])
        return found


def joined(parts: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """Return the object of all tokens of several ones, in their order."""
    return {name: [value for part in parts for value in part[name]] for name in parts[0]}

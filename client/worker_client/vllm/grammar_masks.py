"""vLLM's grammar bitmask as masks of our steps: for each request as many as it samples tokens."""

from collections.abc import Sequence
from typing import Any

import numpy as np

from worker_client.steps.masks import Mask


def read_masks(grammar_output: Any, num_words: int) -> dict[str, list[Mask]]:
    """Return the masks of each request, by vLLM's id: that of its next token, and one behind each
    draft that its grammar allows. num_words: words of the model's masks."""
    if grammar_output is None:
        return {}
    ids, bitmask = grammar_output.structured_output_request_ids, grammar_output.grammar_bitmask
    rows = bitmask.reshape(len(ids), -1, bitmask.shape[-1])
    return {
        req_id: [fitted_mask(row, num_words) for row in own[: 1 + num_allowed]]
        for req_id, own, num_allowed in zip(
            ids, rows, grammar_output.num_acceptable_drafts, strict=True
        )
    }


def placed_masks(masks: Sequence[Mask], num_drafts: int) -> list[Mask]:
    """Return the masks of a request whose step has so many drafts. Behind a draft that its grammar
    does not allow there is none, and no token may be sampled: the draft is not accepted."""
    missing = 1 + num_drafts - len(masks)
    return [*masks[: 1 + num_drafts], *[np.zeros_like(masks[0])] * missing]


def fitted_mask(mask: Mask, num_words: int) -> Mask:
    """Return a row of vLLM's grammar bitmask with the model's number of words. Its own follows the
    tokenizer's vocabulary; tokens beyond that are not allowed."""
    if len(mask) == num_words:
        return mask
    fitted = np.zeros(num_words, np.int32)
    fitted[: len(mask)] = mask[:num_words]
    return fitted

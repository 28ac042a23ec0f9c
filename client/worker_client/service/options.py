"""The sampling options of a body, which completions and chats share."""

from collections.abc import Mapping
from typing import Final

from worker_client.inputs.request_fields import Json
from worker_client.service.fields import BodyFields
from worker_client.service.response_format import take_response_format

OPTIONS: Final = frozenset(
    (
        *("max_tokens", "min_tokens", "ignore_eos", "stop", "stop_token_ids", "seed", "n"),
        *("include_stop_str_in_output", "temperature", "top_p", "top_k", "min_p", "logit_bias"),
        *("presence_penalty", "frequency_penalty", "repetition_penalty", "priority"),
        *("allowed_token_ids", "bad_words", "logits_processors", "structured_outputs"),
    )
)
"""BodyFields that RequestParser reads as they are."""
DEFAULT_TEMPERATURE: Final = 1.0
ALL_TOKENS: Final = -1
"""Value of top_k by which vLLM's clients ask for none."""


def take_options(fields: BodyFields, defaults: Mapping[str, Json]) -> dict[str, Json]:
    """Return a body's sampling options, as Engine.make takes them. defaults: those of the
    checkpoint (Engine.sampling_defaults). Raises RequestError for what RequestParser does not
    check."""
    options = fields.take_all(OPTIONS)
    grammar = take_response_format(fields, has_other="structured_outputs" in options)
    if grammar is not None:
        options["structured_outputs"] = grammar
    if options.get("top_k") == ALL_TOKENS:
        options["top_k"] = 0
    return {"temperature": DEFAULT_TEMPERATURE, **defaults, **options}

"""Requests of fields that lie side by side, as in JSON, for tests that vary any of them."""

from dataclasses import replace

import msgspec

from worker_client.requests import GenerationRequest, SamplingParams

_SAMPLING = frozenset(SamplingParams.__struct_fields__)


def flat_request(*leading: object, **fields: object) -> GenerationRequest:
    """Return a request with these fields of GenerationRequest and of SamplingParams. leading: id,
    prompt and max_tokens, or the first of them."""
    options = {name: fields.pop(name) for name in fields.keys() & _SAMPLING}
    fields.setdefault("sampling", SamplingParams(**options))  # type: ignore[arg-type]  # any
    return GenerationRequest(*leading, **fields)  # type: ignore[arg-type]  # any


def path_of(field: str) -> str:
    """Return the path of a field in the errors of a GenerationRequest."""
    return f"sampling.{field}" if field in _SAMPLING else field


def changed(request: GenerationRequest, **fields: object) -> GenerationRequest:
    """Return a request with other values of these fields."""
    options = {name: fields.pop(name) for name in fields.keys() & _SAMPLING}
    if options:
        fields["sampling"] = msgspec.structs.replace(request.sampling, **options)
    return replace(request, **fields)  # type: ignore[arg-type]  # any

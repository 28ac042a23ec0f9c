"""Values of answers as JSON."""

from typing import Any, Final

import msgspec

_ENCODER: Final = msgspec.json.Encoder()


def to_json(value: Any) -> bytes:
    """Return a value as JSON in UTF-8. Its texts have no lone surrogates
    (worker_host.plain_text.printable); NaN and infinities become null."""
    return _ENCODER.encode(value)

"""The bytes of tokens, which may be no whole characters. Pure."""

from collections.abc import Callable, Mapping
from typing import Any, Final

from tokenizers import pre_tokenizers

_NUM_BYTES: Final = 256
_BYTE_TOKEN_LENGTH: Final = len("<0x00>")


def token_bytes(decoder: Any) -> Callable[[str], bytes]:
    """Return the function from a token to the bytes that the decoder of a tokenizer.json makes of
    it. Raises ValueError for decoders that do not work on bytes."""
    kinds = list(_leaves(decoder))
    if any(each.get("type") == "ByteFallback" for each in kinds):
        spaces = [
            each["pattern"]["String"]
            for each in kinds
            if each.get("type") == "Replace"
            and each.get("content") == " "
            and "String" in each.get("pattern", ())
        ]
        return lambda name: _fallback_bytes(name, spaces[0] if spaces else " ")
    if any(each.get("type") == "ByteLevel" for each in kinds):
        byte_of = _byte_level()
        return lambda name: _level_bytes(name, byte_of)
    raise ValueError("its decoder is neither ByteLevel nor ByteFallback")


def _leaves(decoder: Any) -> list[Mapping[str, Any]]:
    if not isinstance(decoder, Mapping):
        return []
    return [decoder, *(leaf for each in decoder.get("decoders", ()) for leaf in _leaves(each))]


def _fallback_bytes(name: str, space: str) -> bytes:
    if len(name) == _BYTE_TOKEN_LENGTH and name.startswith("<0x") and name.endswith(">"):
        try:
            return bytes.fromhex(name[3:5])
        except ValueError:
            return name.encode()
    return name.replace(space, " ").encode()


def _level_bytes(name: str, byte_of: Mapping[str, int]) -> bytes:
    values = [byte_of.get(character, _NUM_BYTES) for character in name]
    return name.encode() if _NUM_BYTES in values else bytes(values)


def _byte_level() -> dict[str, int]:
    """Return the byte of each character of byte-level tokens: printable bytes stand for themselves,
    the others for the characters from 256 on."""
    shown = {character for character in pre_tokenizers.ByteLevel.alphabet() if ord(character) < 256}
    hidden = [value for value in range(_NUM_BYTES) if chr(value) not in shown]
    own = {character: ord(character) for character in shown}
    return own | {chr(_NUM_BYTES + index): value for index, value in enumerate(hidden)}

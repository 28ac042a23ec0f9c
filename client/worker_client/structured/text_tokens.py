"""The model's tokenizer as grammars need it: the bytes of each token, which tokens are text, and
the tokens that a text is written with.

A grammar's text is written with tokens that stay in the text of an output: those of the vocabulary,
and added tokens that are not special. Special tokens, ends of sequence and ids without a token are
no text; a grammar gets them by name or id only. The tokens of a text are those of the tokenizer,
without what it would do to a prompt besides: it finds no special tokens, adds no leading space,
and normalizes nothing.
"""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import msgspec
from llguidance import LLTokenizer, TokenizerWrapper
from tokenizers import Tokenizer

from worker_client.inputs.token_bytes import token_bytes


class _Added(msgspec.Struct, frozen=True):
    """An added token of the file, which takes nothing of the text beside it."""

    id: int
    content: str
    special: bool = False
    single_word: bool = False


class TextTokens:
    """Writes texts for llguidance, in the form that its TokenizerWrapper takes."""

    bos_token_id = None

    def __init__(self, file: bytes, vocab_size: int, eos_token_ids: Sequence[int]) -> None:
        """file: a tokenizer.json. vocab_size: the model's; it may have fewer tokens or more.

        Raises:
            ValueError: the file cannot be read, or its tokens have no bytes.
        """
        fields = _read(file)
        added = _added_tokens(fields)
        self.eos_token_id = eos_token_ids[0]
        silent = {each.id for each in added if each.special}.union(eos_token_ids)
        fields["added_tokens"] = [
            msgspec.structs.replace(each, special=each.id in silent) for each in added
        ]
        self._encoder = _encoder(fields)
        names = {number: name for name, number in self._encoder.get_vocab().items()}
        size = max(vocab_size, max(names, default=0) + 1)
        silent.update(number for number in range(size) if number not in names)
        silent.update(range(vocab_size, size))
        self.special_token_ids = sorted(silent)
        bytes_of = token_bytes(fields.get("decoder"))
        self._texts = [b""] * size
        """Bytes of each token; none for one that is no text."""
        self.tokens = [f"<[{number}]>".encode() for number in range(size)]
        """The same, but names of those that are no text."""
        for number, name in names.items():
            if number in silent:
                self.tokens[number] = name.encode()
            else:
                self.tokens[number] = self._texts[number] = bytes_of(name)
        self.names = {each.content: each.id for each in added if each.id not in silent}
        """Added tokens that are text: llguidance knows the names of the others only."""
        self.unwritable = ""
        """A text that the model has no tokens for, and that was to be written."""
        self._greedy: Callable[[str], list[int]] = lambda _: []

    def tokenizer(self, slices: Sequence[str], eos_token_ids: Sequence[int]) -> LLTokenizer:
        """Return llguidance's tokenizer."""
        wrapper = TokenizerWrapper(self)
        made = LLTokenizer(wrapper, eos_token=list(eos_token_ids), slices=list(slices))
        self._greedy = made.greedy_tokenize
        return made

    def __call__(self, text: bytes) -> list[int]:
        """Return the tokens of a UTF-8 text, whose bytes are the text's in any case."""
        shown = text.decode()
        for write in (self._encode, self._greedy):
            tokens = write(shown)
            parts = [self._texts[token] for token in tokens]
            if b"" not in parts and b"".join(parts) == text:
                return tokens
        self.unwritable = shown
        return []

    def _encode(self, text: str) -> list[int]:
        try:
            tokens: list[int] = self._encoder.encode(text, add_special_tokens=False).ids
        except Exception:  # tokenizers raises bare Exceptions, for a regular expression perhaps
            return []
        return tokens


def _read(file: bytes) -> dict[str, Any]:
    try:
        raw = msgspec.json.decode(file, type=dict[str, msgspec.Raw])
        parts = ("added_tokens", "decoder", "normalizer", "pre_tokenizer")
        read = {name: msgspec.json.decode(raw[name]) for name in parts if name in raw}
    except msgspec.MsgspecError as error:
        raise ValueError(f"it is no tokenizer.json: {error}") from None
    return {**raw, **read}


def _added_tokens(fields: Mapping[str, Any]) -> list[_Added]:
    try:
        return msgspec.convert(fields.get("added_tokens") or [], list[_Added])
    except msgspec.ValidationError as error:
        raise ValueError(f"it has malformed added tokens: {error}") from None


def _encoder(fields: Mapping[str, Any]) -> Tokenizer:
    """Return a tokenizer of texts as they are."""
    none = {"post_processor": None, "truncation": None, "padding": None}
    alone = {"lstrip": False, "rstrip": False, "normalized": False}
    added = [{**msgspec.structs.asdict(each), **alone} for each in fields["added_tokens"]]
    own = {
        **none,
        "added_tokens": added,
        "normalizer": _spaces_alone(fields.get("normalizer")),
        "pre_tokenizer": _without_prefix(fields.get("pre_tokenizer")),
    }
    try:
        encoder = Tokenizer.from_buffer(msgspec.json.encode({**fields, **own}))
    except Exception as error:  # tokenizers raises bare Exceptions
        raise ValueError(str(error)) from None
    encoder.encode_special_tokens = True  # as text
    return encoder


def _spaces_alone(normalizer: Any) -> Any:
    """Return what a normalizer does to spaces, which decoders undo; None if that is nothing."""
    if not isinstance(normalizer, Mapping):
        return None
    if normalizer.get("type") == "Sequence":
        parts = list(filter(None, map(_spaces_alone, normalizer.get("normalizers", ()))))
        return {"type": "Sequence", "normalizers": parts} if parts else None
    is_kept = normalizer.get("type") == "Replace" and normalizer.get("pattern") == {"String": " "}
    return normalizer if is_kept else None


def _without_prefix(part: Any) -> Any:
    """Return a pre-tokenizer that adds no leading space."""
    if not isinstance(part, Mapping):
        return part
    made = dict(part)
    if "pretokenizers" in made:
        made["pretokenizers"] = list(map(_without_prefix, made["pretokenizers"]))
    if "add_prefix_space" in made:
        made["add_prefix_space"] = False
    if made.get("type") == "Metaspace":
        made["prepend_scheme"] = "never"
    return made

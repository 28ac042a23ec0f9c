"""Text to token ids and back, by the model's tokenizer.json. The only user of `tokenizers`."""

from collections.abc import Sequence
from pathlib import Path

from tokenizers import Tokenizer as _Tokenizer

from client.errors import ClientConfigError

FILE_NAME = "tokenizer.json"


class Tokenizer:
    """A model's tokenizer."""

    def __init__(self, path: Path) -> None:
        """Read a tokenizer.json.

        Raises:
            ClientConfigError: it cannot be read.
        """
        try:
            self._tokenizer = _Tokenizer.from_file(str(path))
        except Exception as error:  # tokenizers raises bare Exception
            raise ClientConfigError(
                f"cannot read the tokenizer: {error}",
                field="model",
                value=str(path),
                fix="repair the file, or remove it and use prompt_token_ids",
            ) from None

    def encode(self, text: str) -> list[int]:
        """Return the token ids of a text, with the special tokens that its template adds."""
        ids: list[int] = self._tokenizer.encode(text).ids
        return ids

    def decode(self, token_ids: Sequence[int]) -> str:
        """Return the text of token ids, without special tokens."""
        text: str = self._tokenizer.decode(list(token_ids), skip_special_tokens=True)
        return text


def load_tokenizer(model: Path) -> Tokenizer | None:
    """Return the tokenizer of a checkpoint directory; None where it has none."""
    path = model / FILE_NAME
    return Tokenizer(path) if path.is_file() else None

"""Prompts with embeddings in place of token ids. The embeddings themselves are an upload
(uploads.py). The extension says which positions of the prompt they fill."""

from typing import Annotated, Final, Literal, NamedTuple

from msgspec import Meta

from rpc_schema.base import ContentHash, Count, Extension, Positive, Value

MAX_EMBEDDED_RANGES: Final = 256
"""Bound on the ranges of one request."""

EmbedsDtype = Literal["float32", "float16", "bfloat16"]


class EmbeddedRange(Value, frozen=True, kw_only=True):
    """Consecutive positions of a prompt that are embeddings."""

    start: Count
    length: Positive


class PromptEmbeds(Extension, frozen=True, tag=12, kw_only=True):
    """Embeddings at positions of a request's prompt: the rows of an uploaded tensor [rows, width].
    The token ids at these positions are placeholders, and their own embeddings are not used. Every
    rank of the first stage must keep the upload until the request ends. A step that needs a missing
    upload fails."""

    content_hash: ContentHash
    """Name of the upload. Rows are converted to the model's dtype."""
    dtype: EmbedsDtype
    """Dtype of the uploaded rows."""
    width: Positive
    """The model's hidden size."""
    ranges: Annotated[tuple[EmbeddedRange, ...], Meta(min_length=1, max_length=MAX_EMBEDDED_RANGES)]
    """Ascending, without overlap, within the prompt. The rows fill them in order, exactly one row
    per position."""

    @property
    def num_rows(self) -> int:
        """Rows of the upload."""
        return sum(each.length for each in self.ranges)

    @property
    def uploads(self) -> tuple[bytes, ...]:
        return (self.content_hash,)


class EmbedsFault(NamedTuple):
    """The reason to refuse embeddings, as an error's field, value and fix."""

    field: str
    value: object
    fix: str


def embeds_fault(
    embeds: PromptEmbeds, hidden_size: int, num_prompt_tokens: int
) -> EmbedsFault | None:
    """Return the first fault of a request's embeddings; None if there is none. The same on both
    sides. hidden_size: the model's."""
    if embeds.width != hidden_size:
        return EmbedsFault("width", embeds.width, f"give rows of {hidden_size}, the hidden size")
    end = 0
    for each in embeds.ranges:
        if each.start < end:
            fix = "give ranges in ascending order, apart from each other"
            return EmbedsFault("ranges", (each.start, each.length), fix)
        end = each.start + each.length
        if end > num_prompt_tokens:
            fix = f"end within the prompt, which has {num_prompt_tokens} tokens"
            return EmbedsFault("ranges", (each.start, each.length), fix)
    return None

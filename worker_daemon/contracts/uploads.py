"""An uploaded tensor as its readers see it."""

from collections.abc import Callable
from typing import Any, Protocol, TypeAlias

from numpy.typing import NDArray


class UploadedTensor(Protocol):
    """A complete tensor in host memory, whose hash was checked."""

    @property
    def dtype(self) -> str:
        """Name of its dtype, as in rpc_schema/uploads.py."""

    @property
    def array(self) -> NDArray[Any]:
        """Read-only, in the upload's shape; bfloat16 as uint16. Its memory lives as long as a
        reference to it, even if the upload is dropped."""


FindUpload: TypeAlias = Callable[[bytes], UploadedTensor | None]
"""Returns the complete upload with a content hash; None if there is none."""


def no_uploads(content_hash: bytes) -> None:
    """Find nothing: a FindUpload for runners without uploads."""
    return

"""A part's addition to a step's reply. Only a value."""

from typing import NamedTuple

from torch import Tensor

from rpc_schema.extensions import ReplyExtension


class Report(NamedTuple):
    """An extension of a reply, and its frames' columns."""

    extension: ReplyExtension
    columns: tuple[Tensor, ...]
    """On the device or the host; as many as the extension has frames."""
    per_row: bool = True
    """True if the columns have an entry for each sample."""
    is_one_frame: bool = False
    """True if the concatenated columns are the only frame."""

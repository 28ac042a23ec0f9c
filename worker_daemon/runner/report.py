"""A part's addition to a step's reply. A value alone."""

from dataclasses import dataclass

from torch import Tensor

from rpc_schema.extensions import ReplyExtension


@dataclass(frozen=True, slots=True)
class Report:
    """A reply's extension, with an entry for each row that samples; of the forward pass, with as
    many as it likes."""

    extension: ReplyExtension
    columns: tuple[Tensor, ...]
    """On the device; as many as the extension has frames."""

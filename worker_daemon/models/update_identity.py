"""Identity of weights that a trainer has sent: ranks have the same if they took part in the same
updates, from the same weights on."""

import hashlib

from worker_daemon.contracts.source_identity import SourceIdentity


class UpdateIdentity:
    """The identity of one update, while it is received."""

    def __init__(self, base: SourceIdentity | None, epoch: int, seq: int) -> None:
        """base: of the weights that a partial update changes; None if it replaces all. epoch, seq:
        of its StartWeightUpdate, which no other request has."""
        self._digest = hashlib.sha256(b"" if base is None else base.content)
        self.add(f"{epoch} {seq}".encode())

    def add(self, contents: bytes) -> None:
        """Add what determines the contents of a round of tensors; empty for a trainer's memory,
        which all ranks receive from."""
        self._digest.update(hashlib.sha256(contents).digest())

    def value(self) -> SourceIdentity:
        """Return the identity after all rounds so far."""
        return SourceIdentity(content=self._digest.digest())

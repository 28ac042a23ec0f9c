"""Names weights and layout, which decide the bytes of a rank's KV blocks besides their hashes: so a
block outside of the KV cache is never taken for that of another model, version or rank."""

import os
from collections.abc import Sequence
from dataclasses import dataclass, field
from hashlib import blake2b

from worker_daemon.models.weight_state import WeightState
from worker_daemon.runner.connectors.block_files import IDENTITY_BYTES


@dataclass(frozen=True, slots=True, eq=False)
class BlockIdentity:
    """Any thread may call it."""

    weights: Sequence[WeightState]
    """The states of the weights that compute the blocks: the model's, and the draft model's."""
    layout: bytes
    """All else that decides the bytes of a block and is not hashed: the configuration, the pages,
    and which part of them this rank has."""
    _life: bytes = field(default_factory=lambda: os.urandom(16))
    """Names this object. Weights that were sent have an identity by the updates that have sent
    them, which another daemon may give to other weights."""

    def of(self, tag: bytes) -> bytes:
        """Return 16 bytes that name the weights of now, the layout, and the tag of the hashes."""
        digest = blake2b(digest_size=IDENTITY_BYTES)
        for part in (tag, self.layout, *self._weights()):
            digest.update(len(part).to_bytes(8, "little") + part)
        return digest.digest()

    @property
    def is_whole(self) -> bool:
        """True if the weights are complete, so that they are those of their identity."""
        return all(state.report.state == "whole" for state in self.weights)

    def _weights(self) -> list[bytes]:
        parts = []
        for state in self.weights:
            report = state.report  # one value: another thread may be changing the state
            identity = report.identity
            parts += [report.version.to_bytes(8, "little"), identity.content]
            parts.append(identity.stamps or self._life)
        return parts

"""A group's uploads in a dictionary, chunk by chunk, with a limit on their size and errors on
demand."""

from collections import Counter, deque
from collections.abc import Sequence

import numpy as np

from rpc_schema.error_replies import (
    ControlErrorReply,
)
from rpc_schema.errors import (
    ErrorCode,
    ErrorScope,
    WorkerError,
)
from worker_client.errors import (
    remote_error,
)
from worker_client.inputs.host_tensor import HostTensor

CHUNK_ROWS = 2048
HIDDEN = 64


def tensor(num_rows: int, seed: int = 0) -> HostTensor:
    """Return random rows; CHUNK_ROWS of them are a chunk."""
    rows = np.random.default_rng(seed).standard_normal((num_rows, HIDDEN), np.float32)
    return HostTensor.from_array(rows)


def refusal(code: ErrorCode) -> WorkerError:
    """Return a daemon's refusal."""
    reply = ControlErrorReply(call=1, code=code, scope=ErrorScope.REQUEST, message="no")
    return remote_error(reply, rank=0, endpoint="ipc:///w0")


class UploadingRanks:
    """Uploads of the first stage."""

    first_stage_ranks = ranks = range(2)

    def __init__(self, room: int = 1 << 40) -> None:
        """room: bytes that fit."""
        self.uploads = self
        self.there: dict[bytes, int] = {}
        """Size of each complete upload, by its hash."""
        self.elsewhere: dict[bytes, HostTensor] = {}
        """What one rank has, and the driver may read."""
        self.room = room
        self.num_bytes = 1 << 40
        """Room that the ranks say they have, for all uploads together."""
        self.num_chunks: Counter[bytes] = Counter()
        self.refuses = False
        self.errors: deque[Exception | None] = deque()
        """Raised in place of the next chunks; None: the chunk is taken."""

    def capacity(self) -> int:
        return self.num_bytes

    def read(self, content_hashes: Sequence[bytes], ranks: Sequence[int]) -> list[HostTensor]:
        return [self.elsewhere[name] for name in content_hashes if name in self.elsewhere]

    def begin(self, tensors: Sequence[HostTensor], ranks: Sequence[int] | None = None) -> "Chunks":
        assert ranks == self.first_stage_ranks
        return Chunks(self, [t for t in tensors if t.content_hash not in self.there])

    def find(
        self, content_hashes: Sequence[bytes], ranks: Sequence[int] | None = None
    ) -> list[bool]:
        return [name in self.there for name in content_hashes]

    def drop(self, content_hashes: Sequence[bytes], ranks: Sequence[int] | None = None) -> None:
        for name in content_hashes:
            self.there.pop(name, None)


class Chunks:
    """An upload under way."""

    def __init__(self, ranks: UploadingRanks, tensors: Sequence[HostTensor]) -> None:
        self._ranks = ranks
        self._sizes = {t.content_hash: len(t.data) for t in tensors}
        self._left = [
            t.content_hash for t in tensors for _ in range(0, len(t.data), CHUNK_ROWS * HIDDEN * 4)
        ]

    def finish(self) -> None:
        while self.proceed():
            pass

    def proceed(self) -> bool:
        if not self._left:
            return False
        ranks, name = self._ranks, self._left[0]
        if ranks.refuses:
            raise refusal(ErrorCode.CONFIG)
        if sum(ranks.there.values()) + self._sizes[name] > ranks.room:
            raise refusal(ErrorCode.CAPACITY)
        error = ranks.errors.popleft() if ranks.errors else None
        if error is not None:
            raise error
        ranks.num_chunks[name] += 1
        self._left.pop(0)
        if name not in self._left:
            ranks.there[name] = self._sizes[name]
        return True

"""Chooses the replica of a new request: the one with the least to compute until the request has
ended there, by the tokens of its unfinished requests and by the prefixes that it has computed."""

from collections import OrderedDict
from collections.abc import Collection, Iterable, Iterator
from hashlib import blake2b
from typing import Final, NamedTuple

import numpy as np

from worker_client.requests import GenerationRequest, parent_id, sample_id

PREFIX_TOKENS: Final = 64
"""Prefixes are known at multiples of so many tokens."""
MAX_MATCHED: Final = 512
"""Multiples that are looked at: the first 32,768 tokens of a prompt."""
MAX_PREFIXES: Final = 1 << 15
"""Prefixes that are remembered of a replica, 2 million tokens; the least recently used ones go."""
_HASH_BYTES: Final = 16


class _Share(NamedTuple):
    replica: int
    num_tokens: int


class ReplicaPlacement:
    """Belongs to one thread. A prefix counts as computed from the moment at which a request with it
    was placed. What the replica's KV cache evicts later is not known here: so much is computed
    again, at most."""

    def __init__(self, num_replicas: int) -> None:
        self._num_tokens = [0] * num_replicas
        """Tokens that unfinished requests have to compute, by replica."""
        self._placed: dict[str, _Share] = {}
        """By name of an unfinished request."""
        self._prefixes: list[OrderedDict[bytes, None]] = [
            OrderedDict() for _ in range(num_replicas)
        ]
        """Hashes of prefixes by replica, the most recently used ones last."""

    def place(self, name: str, request: GenerationRequest, among: Collection[int]) -> int:
        """Choose one of these replicas, of which there is at least one, for a checked request, and
        count it there until remove(name). Samples of a prompt (sample_id) follow the first one."""
        first = self.replica_of(sample_id(parent_id(name), 0))
        if first is not None and first in among:
            self.count(name, first, request.max_tokens)
            return first
        hashes = [*_prefixes_of(request)]
        known = {replica: self._num_known(replica, hashes) for replica in among}
        chosen = min(among, key=lambda replica: self._num_tokens[replica] - known[replica])
        self._remember(chosen, hashes)
        self.count(name, chosen, _size_of(request) - known[chosen])
        return chosen

    def count(self, name: str, replica: int, num_tokens: int) -> None:
        """Count a request that is on a replica until remove(name). num_tokens: that it has to
        compute."""
        self._placed[name] = _Share(replica, num_tokens)
        self._num_tokens[replica] += num_tokens

    def replica_of(self, name: str) -> int | None:
        """Return the replica of an unfinished request, None for any other."""
        placed = self._placed.get(name)
        return None if placed is None else placed.replica

    def replicas_of(self, names: Iterable[str]) -> list[int | None]:
        """Return replica_of each of these."""
        placed = map(self._placed.get, names)
        return [None if each is None else each.replica for each in placed]

    def remove(self, name: str) -> None:
        """Note that a request has ended. Unknown ones are ignored."""
        placed = self._placed.pop(name, None)
        if placed is not None:
            self._num_tokens[placed.replica] -= placed.num_tokens

    def forget_prefixes(self, replica: int | None = None) -> None:
        """Note that a replica, or with None each, has not computed any prefix with its weights."""
        for own in self._prefixes if replica is None else [self._prefixes[replica]]:
            own.clear()

    def _num_known(self, replica: int, hashes: Iterable[bytes]) -> int:
        """Return how many of a prompt's first tokens a replica has computed."""
        own, count = self._prefixes[replica], 0
        for each in hashes:
            if each not in own:
                break
            count += PREFIX_TOKENS
        return count

    def _remember(self, replica: int, hashes: Iterable[bytes]) -> None:
        own = self._prefixes[replica]
        for each in hashes:
            own[each] = None
            own.move_to_end(each)
        while len(own) > MAX_PREFIXES:
            own.popitem(last=False)


def _size_of(request: GenerationRequest) -> int:
    """Return the tokens that a request computes, at most."""
    num_out = 0 if request.pooling is not None else request.max_tokens * request.sampling.n
    return len(request.prompt) + num_out


def _prefixes_of(request: GenerationRequest) -> Iterator[bytes]:
    """Yield the hash of each prefix, shorter ones first; none for prompts that are not of tokens
    alone."""
    if request.prompt_embeds is not None:
        return
    tokens = np.asarray(request.prompt[: PREFIX_TOKENS * MAX_MATCHED], np.int64)
    parent = (request.lora or "").encode()
    for first in range(0, tokens.size - PREFIX_TOKENS + 1, PREFIX_TOKENS):
        raw = tokens[first : first + PREFIX_TOKENS].tobytes()
        parent = blake2b(parent + raw, digest_size=_HASH_BYTES).digest()
        yield parent

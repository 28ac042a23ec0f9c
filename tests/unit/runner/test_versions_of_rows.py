"""Which versions of the weights have sampled the tokens of rows that were kept, against a list of a
version for each token."""

import random

from worker_daemon.runner.token_versions import RowEnd, TokenVersions

MOST = 64


def test_rows_tell_the_versions_of_their_tokens_until_they_are_admitted_again():
    seed = random.randrange(1 << 30)
    rng, versions = random.Random(seed), TokenVersions(MOST)
    tokens: dict[int, list[int]] = {}
    generations: dict[int, int] = {}
    for version in range(200):
        for slot in range(6):
            if slot not in tokens or rng.random() < 0.05:
                tokens[slot], generations[slot] = [version], generations.get(slot, 0) + 1
            tokens[slot] += [version] * rng.randrange(4)
        ended = rng.sample(range(6), 1)
        rows = [RowEnd(s, generations[s], len(t)) for s, t in tokens.items() if s not in ended]
        versions.end(version, rows)
        for slot in ended:
            del tokens[slot]
        for slot, own in tokens.items():
            spans = versions.of(slot, generations[slot])
            assert spans and len(spans) <= MOST, seed
            assert versions.of(slot, generations[slot] + 1) == ()
            told, first = [], 0
            for span in spans:
                told += [span.version] * (span.end - first)
                first = span.end
            assert len(told) == len(own), seed
            known = [
                version if mine is not None else None
                for version, mine in zip(own, told, strict=True)
            ]
            assert known == told, seed
            assert told.count(None) == 0 or len(spans) == MOST
        for slot in ended:
            assert versions.of(slot, generations[slot]) == ()
    versions.forget()
    assert all(versions.of(slot, generation) == () for slot, generation in generations.items())

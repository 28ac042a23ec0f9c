"""The exchanges of a trainer's shards: every worker gets exactly the boxes that it wants, from the
ranks that have them."""

import math
import random

import numpy as np
import pytest

from rpc_schema.shard_plan import SentTensor, plan_rounds, region_of
from rpc_schema.shard_wants import (
    LongValueError,
    decode_wants,
    encode_wants,
    get_long,
    put_long,
)

NUM_SOURCES, NUM_WORKERS = 3, 4


@pytest.fixture
def rng():
    seed = random.randrange(1 << 30)
    print(f"seed {seed}")
    return random.Random(seed)


def cuts(rng, size):
    """Bounds of 1 to 3 pieces of a dimension; some may be empty."""
    inner = sorted(rng.randrange(size + 1) for _ in range(rng.randrange(3)))
    return list(zip([0, *inner], [*inner, size], strict=True))


def a_request(rng):
    """Whole tensors by name, and how they are sent."""
    tensors, sent = {}, []
    for number in range(12):
        name, shape = f"t{number}", [rng.randrange(1, 9) for _ in range(rng.randrange(4))]
        whole = np.arange(math.prod(shape), dtype=np.float32).reshape(shape) + 1000 * number
        tensors[name] = whole
        if not shape or rng.random() < 0.3:
            sent.append(SentTensor(name, "float32", tuple(shape), (), rng.randrange(NUM_SOURCES)))
            continue
        rows = [(bounds,) for bounds in cuts(rng, shape[0])]
        if len(shape) > 1:
            rows = [(first, second) for (first,) in rows for second in cuts(rng, shape[1])]
        for box in rows:
            origin = (*(start for start, _ in box), *[0] * (len(shape) - len(box)))
            size = (*(stop - start for start, stop in box), *shape[len(box) :])
            source = rng.randrange(NUM_SOURCES)
            sent.append(SentTensor(name, "float32", size, origin, source))
    return tensors, sent


def some_wants(rng, tensors):
    wants = {}
    for name, whole in tensors.items():
        boxes = [tuple(rng.choice(cuts(rng, size)) for size in whole.shape)]
        wants[name] = tuple(boxes) if rng.random() < 0.8 else ()
    return wants


def slices(box, at=None):
    at = at or [0] * len(box)
    return tuple(
        slice(start + first, stop + first) for (start, stop), first in zip(box, at, strict=True)
    )


@pytest.mark.parametrize("packed_bytes", [1, 64, 300, 1 << 20])
def test_every_worker_gets_what_it_wants_and_no_more(rng, packed_bytes):
    tensors, sent = a_request(rng)
    wants = [some_wants(rng, tensors) for _ in range(NUM_WORKERS)]
    got = [{name: np.full(whole.shape, -1.0) for name, whole in tensors.items()} for _ in wants]
    num_bytes = [0] * NUM_WORKERS
    ended = []
    for step in plan_rounds(sent, NUM_SOURCES, packed_bytes):
        assert len(step.parts) == NUM_SOURCES
        ended += step.ended()
        for source, parts in enumerate(step.parts):
            assert all(sent[part.tensor].source == source for part in parts)
            assert len(parts) == 1 or sum(part.num_bytes for part in parts) <= packed_bytes
            for worker, wanted in enumerate(wants):
                region, end = region_of(sent, parts, wanted), 0
                for share in region.shares:
                    assert share.offset % 256 == 0 and share.offset >= end
                    end = share.offset + share.num_bytes
                    piece = sent[share.tensor]
                    origin = piece.origin or (0,) * len(piece.shape)
                    values = tensors[piece.name][slices(share.box, origin)]
                    assert values.nbytes == share.num_bytes and values.shape == share.shape
                    place = got[worker][piece.name][slices(share.box, origin)]
                    assert (place == -1).all(), "it came twice"
                    got[worker][piece.name][slices(share.box, origin)] = values
                    num_bytes[worker] += share.num_bytes
                assert region.num_bytes >= end
    assert sorted(ended) == [index for index, each in enumerate(sent) if 0 not in each.shape]
    for worker, wanted in enumerate(wants):
        size = 0
        for name, whole in tensors.items():
            expected = np.full(whole.shape, -1.0)
            for box in wanted[name]:
                expected[slices(box)] = whole[slices(box)]
                size += whole[slices(box)].nbytes
            assert np.array_equal(got[worker][name], expected)
        assert num_bytes[worker] == size


def test_long_values_come_back(rng):
    board = {}
    tensors, sent = a_request(rng)
    wants = some_wants(rng, tensors)
    put_long(board.__setitem__, "wants", encode_wants(list(wants.values())))
    assert decode_wants(get_long(board.__getitem__, "wants"), sent) == wants
    long = rng.randbytes(200_000)
    put_long(board.__setitem__, "long", long)
    assert max(map(len, board.values())) < 1 << 16 and get_long(board.__getitem__, "long") == long
    for damage in ({"long": b"x"}, {"long": b"9999"}, {"long.2": b"?"}, {"long": b"1"}):
        with pytest.raises(LongValueError):
            get_long((board | damage).__getitem__, "long")
    with pytest.raises(LongValueError, match="other tensors"):
        decode_wants(encode_wants([((((0, 1),),) * 9)] * len(wants)), sent)

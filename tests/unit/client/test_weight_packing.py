"""The plan that both sides of a broadcast follow: every row once, in order, within its bounds."""

import math

from hypothesis import given
from hypothesis import strategies as st

from rpc_schema.weight_packing import ALIGNMENT, ITEM_BYTES, plan_transfers

SHAPES = st.lists(st.lists(st.integers(0, 40), max_size=3).map(tuple), max_size=12)


def row_bytes(shape, dtype):
    return math.prod(shape[1:]) * ITEM_BYTES[dtype]


@given(SHAPES, st.data(), st.one_of(st.just(0), st.integers(1, 20_000)))
def test_every_row_of_every_tensor_is_in_one_transfer(shapes, data, packed_bytes):
    dtypes = [data.draw(st.sampled_from(sorted(ITEM_BYTES))) for _ in shapes]
    transfers = plan_transfers(shapes, dtypes, packed_bytes)
    rows = []
    for transfer in transfers:
        end = 0
        for part in transfer.parts:
            shape, dtype = shapes[part.tensor], dtypes[part.tensor]
            assert part.num_bytes == (part.stop - part.start) * row_bytes(shape, dtype) > 0
            assert part.offset >= end
            assert part.offset % ALIGNMENT == 0
            end = part.offset + part.num_bytes
            total = shape[0] if shape else 1
            assert part.is_last == (part.stop == total)
            rows += [(part.tensor, row) for row in range(part.start, part.stop)]
        assert transfer.num_bytes == end
        single_row = len(transfer.parts) == 1 and part.stop - part.start == 1
        assert packed_bytes == 0 or end <= packed_bytes or single_row
        assert packed_bytes or len(transfer.parts) == 1
    expected = [
        (index, row)
        for index, shape in enumerate(shapes)
        if math.prod(shape)
        for row in range(shape[0] if shape else 1)
    ]
    assert rows == expected


def test_small_tensors_share_a_transfer_and_large_ones_are_cut():
    transfers = plan_transfers([(4,), (4,), (100, 64)], ["float32"] * 3, 10_000)
    assert [[part.tensor for part in transfer.parts] for transfer in transfers] == [
        [0, 1, 2],
        [2],
        [2],
    ]
    assert len(plan_transfers([(4,), (4,), (100, 64)], ["float32"] * 3, 0)) == 3

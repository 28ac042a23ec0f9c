"""Dummy weights that are filled together, as experts are."""

import pytest
import torch

from worker_daemon.layers.parameter import Kind, Piece
from worker_daemon.models.dummy import fill_dummy


@pytest.mark.parametrize("kind", ["matrix", "routed_embedding", "fp8", "int4"])
def test_regions_filled_together_have_the_values_of_each_alone(kind: Kind) -> None:
    place = slice(0, 5), slice(0, 7)
    pieces = [
        Piece(f"{kind}.{first}", (40, 60), (slice(first, first + 5), slice(9, 16)), place, kind)
        for first in (0, 8, 20)
    ]
    together, alone = torch.zeros(2, 3, 5, 7, dtype=torch.int32 if kind == "int4" else torch.float)
    fill_dummy(list(together), pieces, 3)
    for target, piece in zip(alone, pieces, strict=True):
        fill_dummy([target], [piece], 3)
    assert torch.equal(together, alone)
    assert len({tuple(values.flatten().tolist()) for values in together}) == len(pieces)

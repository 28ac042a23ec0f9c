"""The tiles that ship: they parse, fit what kernels take, and unknown shapes are left to torch."""

from importlib.resources import files

import pytest

from worker_daemon.kernels.fp8_linear import has_block_gemm
from worker_daemon.kernels.linear import MAX_TILES
from worker_daemon.kernels.tuning import (
    ROW_BUCKETS,
    MatrixTile,
    Tuning,
    VectorTile,
    default_vector_tile,
    file_name,
    format_tuning,
    load_tuning,
    parse_tuning,
    row_bucket,
)

SHIPPED = list((files("worker_daemon.kernels") / "tuned").iterdir())


def test_the_smallest_bucket_that_holds_the_rows() -> None:
    assert [row_bucket(rows) for rows in (1, 2, 16, 17, 32, 33, 64)] == [1, 16, 16, 32, 32, 64, 64]
    assert row_bucket(65) is None


def test_what_is_written_is_read_back() -> None:
    tuning = Tuning(
        {
            (64, 128, 1): VectorTile(1, 128, 4),
            (64, 128, 16): None,
            (32, 128, 64): MatrixTile(16, 32, 3, 4, 2, 512),
        }
    )
    assert parse_tuning(format_tuning(tuning)) == tuning


@pytest.mark.parametrize(
    "text", ['{"64": {"1": null}}', '{"6x4": {"1": {"block_o": 1}}}', '{"6x4": {"1": 3}}', "[]x"]
)
def test_other_text_is_refused(text: str) -> None:
    with pytest.raises((ValueError, TypeError)):
        parse_tuning(text)


def test_an_unknown_device_has_one_row_kernels_only() -> None:
    tuning = load_tuning("No Such Device")
    assert tuning.tile(1, 640, 320) == default_vector_tile(320)
    assert [tuning.tile(rows, 640, 320) for rows in (2, 64, 65)] == [None] * 3


def test_an_entry_may_leave_one_row_to_torch() -> None:
    assert Tuning({(64, 128, 1): None}).tile(1, 64, 128) is None


def test_the_device_is_named_by_its_file() -> None:
    assert file_name("NVIDIA H200") == "nvidia_h200.json"
    assert file_name("NVIDIA H100 80GB HBM3") == "nvidia_h100_80gb_hbm3.json"
    assert load_tuning("NVIDIA H200").tiles


@pytest.mark.parametrize("kind", ["", " fp8"])
@pytest.mark.parametrize(
    "name",
    [
        "NVIDIA H100 80GB HBM3",
        "NVIDIA H200 NVL",
        "NVIDIA GH200 480GB",
        "NVIDIA GH200 144G HBM3e",
    ],
)
def test_devices_with_the_chip_of_an_h200_use_its_tiles(name, kind) -> None:
    assert load_tuning(name + kind) == load_tuning("NVIDIA H200" + kind)
    assert load_tuning(name + kind).tiles


@pytest.mark.parametrize(
    "name",
    [
        "NVIDIA H100 PCIe",
        "NVIDIA H100 80GB HBM3 MIG 1g.10gb",
        "NVIDIA H20",
        "NVIDIA B200",
        "NVIDIA L40S",
    ],
)
def test_other_chips_do_not(name) -> None:
    assert not load_tuning(name).tiles


@pytest.mark.parametrize("shipped", SHIPPED, ids=lambda path: path.name)
def test_every_shipped_tile_can_be_launched(shipped) -> None:
    for (num_outputs, _, bucket), tile in parse_tuning(shipped.read_text()).tiles.items():
        assert bucket in ROW_BUCKETS
        if tile is None:
            continue
        assert isinstance(tile, VectorTile if bucket == 1 else MatrixTile)
        for size in (tile.block_o, tile.block_i, tile.num_warps):
            assert size & (size - 1) == 0
        if isinstance(tile, MatrixTile):
            assert tile.prefetch % 8 == 0
            assert -(-num_outputs // tile.block_o) <= MAX_TILES


def test_torch_multiplies_by_block_scales_on_hopper_alone_and_by_a_newer_cublas() -> None:
    versions = ("12.8", "12.9", "13.0", None)
    assert [has_block_gemm((9, 0), version) for version in versions] == [False, True, True, False]
    assert not has_block_gemm((8, 9), "13.0") and not has_block_gemm((10, 0), "13.0")

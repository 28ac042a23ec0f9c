"""Decodes that the device cuts by their keys, under Triton's interpreter; conftest.py runs it.

The lengths of a step are drawn anew in each run, from a seed that a failure shows.
"""

import random
import secrets
from dataclasses import dataclass, replace

import pytest
import torch
from triton.runtime.interpreter import InterpreterBuilder

from benchmarks.paged_reference import PagedBatch, Shape, dense_attention, relative_error
from tests.support.attention_steps import random_sinks
from tests.support.fp8_caches import check_paged, fp8_decode, in_fp8, random_scales
from tests.support.rotated_decodes import check_fused, make_decode
from tests.unit.kernels.interpreted_attention import attend, build, check
from worker_daemon.kernels.decode_schedule import Cutting, schedule_decodes
from worker_daemon.kernels.query_blocks import BlockDivision, divide_queries
from worker_daemon.kernels.tiles import DeviceLimits, Tile

TILE = Tile(16, 32, 4, 3)
FEW_SMS = DeviceLimits(num_sms=4, shared_memory_bytes=96 * 1024)
CUT = {"min_piece": 32, "limits": FEW_SMS, "is_cut": True}
SEED = secrets.randbits(32)


def skewed_lengths(rng: random.Random, count: int) -> list[int]:
    """Return lengths of which one is much longer than the others, and some are tiny."""
    lengths = [rng.choice([1, 2, rng.randint(3, 70)]) for _ in range(count)]
    lengths[rng.randrange(count)] = rng.randint(300, 600)
    return lengths


@dataclass(frozen=True)
class Item:
    seq: int
    piece: int
    pieces: int
    first_partial: int


def items_of(lengths: list[tuple[int, int]], cutting: Cutting) -> tuple[list[Item], PagedBatch]:
    """Return the items of sequences of (query_len, seq_len)."""
    batch = build(Shape(2, 1, 8), lengths, seed=len(lengths))
    order, starts = batch.seq_order.tolist(), batch.query_start_loc.tolist()
    schedule = schedule_decodes(batch.metadata, cutting, pdl=False)
    rows = schedule.entries.tolist()
    assert len(rows) == schedule.num_items + 1
    items = list[Item]()
    starting = {place: row[8] for place, row in enumerate(rows) if row[8] >= 0}
    for place, (token, next_token, row, keys, piece, pieces, partial, idle, _, *done) in enumerate(
        rows
    ):
        assert done == [0] * cutting.num_kv_heads
        if idle < 0:
            seq = next(seq for seq in order if starts[seq : seq + 2] == [token, next_token])
            assert (row, keys) == (batch.seq_rows.tolist()[seq], lengths[seq][1])
            assert token < next_token
            items.append(Item(seq, piece, pieces, partial))
        else:
            # Rows without work come last, and clear the padding in this order.
            assert (token, next_token, keys, pieces) == (starts[-1], starts[-1], 0, 1)
            assert idle == place - len(items)
    assert len(items) <= schedule.num_items
    cut = {i.first_partial: n for n, i in enumerate(items) if i.piece == 0 and i.pieces > 1}
    assert starting == cut
    return items, batch


@pytest.mark.parametrize("slots", [1, 3, 16])
@pytest.mark.parametrize("window", [None, 100])
def test_items_have_each_piece_once_and_are_balanced(slots: int, window: int | None) -> None:
    rng = random.Random(SEED + slots)
    print(f"seed {SEED}")
    for count in (1, 2, 9, 40):
        lengths = [(1, length) for length in skewed_lengths(rng, count)]
        lengths += [(0, 900), (5, 800), (2, 33), (0, 0)]
        rng.shuffle(lengths)
        most_keys = 2**30 if window is None else window + 1
        cutting = Cutting(3, slots, 8 * slots, 16, 24, most_queries=2, most_keys=most_keys)
        items, batch = items_of(lengths, cutting)
        serviced = [seq for seq, (queries, _) in enumerate(lengths) if 0 < queries <= 2]
        assert {item.seq for item in items} == {*serviced}
        keys = {seq: min(lengths[seq][1], most_keys) for seq in serviced}
        pieces = {item.seq: item.pieces for item in items}
        started = [item.seq for item in items if item.piece == 0]
        assert started == [seq for seq in batch.seq_order.tolist() if seq in keys]
        expected = [(seq, piece, pieces[seq]) for seq in started for piece in range(pieces[seq])]
        assert [(item.seq, item.piece, item.pieces) for item in items] == expected
        # Partial results do not overlap.
        ends = 0
        for seq in started:
            if pieces[seq] > 1:
                assert {item.first_partial for item in items if item.seq == seq} == {ends}
                ends += pieces[seq]
        assert ends <= cutting.extra + min(cutting.extra, len(lengths))
        share = sum(keys.values()) / slots
        longest = max(-(-keys[seq] // pieces[seq]) for seq in serviced)
        assert longest <= max(1.5 * share, share / 8 + 1, 24) + 1


def test_equal_lengths_are_cut_as_those_of_a_fixed_number_of_splits() -> None:
    for count, length in ((3, 400), (8, 200), (1, 333)):
        batch = build(Shape(4, 2, 32), [(1, length)] * count, seed=SEED % 1000 + count)
        splits = max(1, min(FEW_SMS.num_sms // count, length // 64))
        fixed = attend(batch, None, num_splits=splits, tile=TILE)
        cut = attend(batch, None, tile=TILE, is_cut=True, limits=FEW_SMS)
        assert relative_error(fixed, cut.double()) < 1e-6


@pytest.mark.parametrize("window", [None, 5, 90])
@pytest.mark.parametrize(("logit_softcap", "has_sinks"), [(None, False), (2.0, True)])
def test_decodes_of_different_lengths(
    window: int | None, logit_softcap: float | None, has_sinks: bool
) -> None:
    """Some of them idle, and none of them has all of its keys in one piece if it is long."""
    print(f"seed {SEED}")
    rng = random.Random(SEED)
    options = {"logit_softcap": logit_softcap, "has_sinks": has_sinks}
    for shape, dtype in ((Shape(4, 2, 64), torch.float32), (Shape(6, 1, 72, 8), torch.float16)):
        lengths = [(1, length) for length in skewed_lengths(rng, 7)] + [(0, 5), (0, 300)]
        rng.shuffle(lengths)
        batch = build(shape, lengths, rng.randrange(1000), dtype, num_padding=3)
        check(batch, window, tile=TILE, **CUT, **options)


def test_wide_heads_and_several_queries() -> None:
    rng = random.Random(SEED)
    print(f"seed {SEED}")
    check(build(Shape(4, 2, 256), [(1, 170), (1, 9), (1, 1)], SEED % 1000), None, **CUT)
    lengths = [(3, 200), (1, rng.randint(1, 60)), (0, 0), (2, 2), (4, rng.randint(4, 60))]
    batch = build(Shape(4, 2, 64), lengths, SEED % 1000, num_padding=6)
    for window in (None, 30):
        check(batch, window, logit_softcap=3.0, has_sinks=True, **CUT)


@pytest.mark.parametrize("window", [None, 40])
def test_decodes_beside_prompts(window: int | None) -> None:
    """The kernels of prompts and of decodes share the step's rows, and padding is cleared once."""
    print(f"seed {SEED}")
    rng = random.Random(SEED)
    for shape in (Shape(8, 2, 64), Shape(20, 1, 16)):
        lengths = [(1, length) for length in skewed_lengths(rng, 5)]
        lengths += [(rng.randint(20, 70), 90), (0, 8), (4, 44), (2, 2), (33, 33)]
        rng.shuffle(lengths)
        batch = build(shape, lengths, rng.randrange(1000), num_padding=4)
        check(batch, window, has_sinks=True, min_piece=32, limits=FEW_SMS)


CUT_BLOCKS = {"min_piece": 32, "min_block_piece": 32, "limits": FEW_SMS, "is_cut": True}


@pytest.mark.parametrize("window", [None, 40])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
def test_short_chunks_of_long_contexts(window: int | None, dtype: torch.dtype) -> None:
    """The keys of their blocks are cut, beside whole prompts and decodes."""
    print(f"seed {SEED}")
    rng = random.Random(SEED)
    for shape in (Shape(8, 2, 64), Shape(3, 3, 24, 8)):
        for num_others in (0, 4):
            lengths = [(count, count + rng.randint(200, 500)) for count in (5, rng.randint(6, 50))]
            lengths += [(1, length) for length in skewed_lengths(rng, num_others or 1)]
            lengths += [(rng.randint(20, 40), 40), (0, 8), (0, 200)][: 2 * num_others]
            rng.shuffle(lengths)
            batch = build(shape, lengths, rng.randrange(1000), dtype, num_padding=num_others)
            check(batch, window, logit_softcap=4.0, has_sinks=num_others > 0, **CUT_BLOCKS)
            check(batch, window, tile=Tile(32, 32, 4, 3), **CUT_BLOCKS)


def test_blocks_have_the_queries_of_each_prompt_and_the_keys_that_they_see() -> None:
    rng = random.Random(SEED)
    print(f"seed {SEED}")
    for count, queries in ((1, 4), (6, 1), (40, 16)):
        lengths = [(rng.choice([0, 1, 3, rng.randint(4, 90)]), 100) for _ in range(count)]
        batch = build(Shape(2, 1, 8), lengths, seed=count, num_padding=5)
        division = BlockDivision(queries, fewest_queries=3)
        blocks = divide_queries(batch.metadata, batch.q.shape[0], division)
        starts, rows = blocks.query_start_loc.tolist(), batch.seq_rows.tolist()
        assert starts[-1] == batch.num_real_tokens
        own = {row: [] for row in rows}
        for block, row in enumerate(blocks.seq_rows.tolist()):
            keys = int(blocks.seq_lens[block])
            if starts[block] < starts[block + 1] and keys >= 0:
                own[row].append((range(starts[block], starts[block + 1]), keys))
        for seq, (query_len, seq_len) in enumerate(lengths):
            first, taken = int(batch.query_start_loc[seq]), own[rows[seq]]
            assert all(len(tokens) <= queries for tokens, _ in taken)
            tokens = [token for block, _ in taken for token in block]
            assert tokens == ([*range(first, first + query_len)] if query_len >= 3 else [])
            for block, keys in taken:
                assert keys == seq_len - query_len + block[-1] + 1 - first
        assert sorted(blocks.seq_order.tolist()) == list(range(blocks.num_seqs))


def test_log_sum_exps_of_what_was_cut() -> None:
    """Also of queries without a key, and of padding."""
    batch = build(Shape(4, 2, 32), [(1, 300), (1, 20), (30, 30)], SEED % 1000, num_padding=2)
    sinks = random_sinks(4, torch.float32)
    out, expected = attend(batch, None, sinks=sinks, min_piece=2**20), []
    for options in ({"min_piece": 2**20}, {"min_piece": 32, "limits": FEW_SMS}, CUT_BLOCKS):
        lse = torch.full((batch.q.shape[0], 4), float("nan"))
        cut = attend(batch, None, sinks=sinks, lse=lse, **options)
        assert relative_error(cut, dense_attention(batch, None, sinks=sinks)) < 1e-6
        expected.append(lse)
    assert relative_error(cut, out) < 1e-6
    for lse in expected[1:]:
        assert torch.equal(lse[32:], torch.full((2, 4), float("-inf")))
        torch.testing.assert_close(lse, expected[0], rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize(("window", "num_padding"), [(None, 4), (50, 0)])
def test_decodes_that_turn_and_store_their_heads(window: int | None, num_padding: int) -> None:
    print(f"seed {SEED}")
    lengths = skewed_lengths(random.Random(SEED), 5)
    step = make_decode(
        Shape(4, 2, 32), lengths, dtype=torch.float16, device="cpu", seed=SEED % 1000,
        is_normed=True, num_idle=2, num_padding=num_padding, has_sinks=True,
    )  # fmt: skip
    check_fused(step, window, tile=TILE, min_piece=32, limits=FEW_SMS)


@pytest.mark.parametrize("window", [None, 60])
def test_caches_in_fp8(window: int | None) -> None:
    print(f"seed {SEED}")
    rng, shape, seed = random.Random(SEED), Shape(4, 2, 64), SEED % 1000
    lengths = skewed_lengths(rng, 4)
    scales = random_scales(2, "cpu", seed)
    for others in ([], [(40, 270)]):
        decodes = [(1, length) for length in lengths]
        batch = in_fp8(build(shape, decodes + others, seed, torch.float16, num_padding=2), scales)
        check_paged(batch, scales, window, min_piece=32, limits=FEW_SMS)
        check_paged(batch, scales, window, **CUT_BLOCKS)
    wide = make_decode(shape, lengths, dtype=torch.float16, device="cpu", seed=seed, num_padding=1)
    fp8_decode(wide, seed).check(window, min_piece=32, limits=FEW_SMS)


def test_the_schedule_is_made_once_for_layers_with_the_same_cutting() -> None:
    batch = build(Shape(4, 2, 32), [(1, 300), (1, 20)], seed=1)
    for window in (None, 40, None, 40):
        attend(batch, window, **CUT)
    assert len(batch.metadata.divisions) == 2
    other = replace(batch)
    attend(other, None, **CUT)
    assert len(other.metadata.divisions) == 1


@pytest.mark.parametrize("shape", [Shape(4, 2, 64), Shape(6, 1, 72, 8)])
def test_the_last_program_to_end_merges_whatever_the_order(
    shape: Shape, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Layers that share a schedule find its counters as it left them."""
    print(f"seed {SEED}")
    rng = random.Random(SEED)
    lengths = [(1, length) for length in [*skewed_lengths(rng, 6), 400]] + [(0, 9)]
    rng.shuffle(lengths)
    batch = build(shape, lengths, rng.randrange(1000), num_padding=2)
    place_program = InterpreterBuilder.set_grid_idx
    order = dict[int, list[int]]()

    def place_in_order(builder: InterpreterBuilder, x: int, y: int, z: int) -> None:
        count = builder.grid_dim[1]
        if y == 0 or count not in order:
            order[count] = rng.sample(range(count), count)
        place_program(builder, x, order[count][y], z)

    monkeypatch.setattr(InterpreterBuilder, "set_grid_idx", place_in_order)
    for _ in range(3):
        check(batch, None, has_sinks=True, **CUT)
    (entries,) = batch.metadata.divisions.values()
    assert not entries[:, -shape.num_kv_heads :].any()

"""Philox4x32-10 against the known answers of the Random123 distribution (kat_vectors), and the
noise made of it."""

import math

import pytest
import torch

from worker_daemon.sample.noise import gumbel_noise, philox4x32

KNOWN_ANSWERS = [
    ((0, 0, 0, 0), (0, 0), (0x6627E8D5, 0xE169C58D, 0xBC57AC4C, 0x9B00DBD8)),
    (
        (0xFFFFFFFF,) * 4,
        (0xFFFFFFFF,) * 2,
        (0x408F276D, 0x41C83B0E, 0xA20BC7C6, 0x6D5451FD),
    ),
    (
        (0x243F6A88, 0x85A308D3, 0x13198A2E, 0x03707344),
        (0xA4093822, 0x299F31D0),
        (0xD16CFE09, 0x94FDCCEB, 0x5001E420, 0x24126EA1),
    ),
]


def philox_by_hand(counter, key):
    """The definition of the paper in Python integers."""
    c, k = list(counter), list(key)
    for _ in range(10):
        p0, p1 = 0xD2511F53 * c[0], 0xCD9E8D57 * c[2]
        c = [(p1 >> 32) ^ c[1] ^ k[0], p1 % 2**32, (p0 >> 32) ^ c[3] ^ k[1], p0 % 2**32]
        k = [(k[0] + 0x9E3779B9) % 2**32, (k[1] + 0xBB67AE85) % 2**32]
    return tuple(c)


@pytest.mark.parametrize(("counter", "key", "expected"), KNOWN_ANSWERS)
def test_known_answers(counter, key, expected):
    words = philox4x32(
        tuple(torch.tensor([c]) for c in counter), tuple(torch.tensor([k]) for k in key)
    )
    assert tuple(int(word) for word in words) == expected


def test_noise_is_the_function_of_seed_position_and_token_that_it_claims_to_be():
    seeds = torch.tensor([0, -1, 0x123456789ABCDEF0, -(2**63)])
    positions = torch.tensor([0, 5, 131071, 2**32 - 1])
    noise = gumbel_noise(seeds, positions, 11)
    for row, (seed, position) in enumerate(zip(seeds.tolist(), positions.tolist(), strict=True)):
        key = (seed % 2**32, (seed >> 32) % 2**32)
        for token in range(11):
            word = philox_by_hand((token // 4, position, 0, 0), key)[token % 4]
            exact = -math.log(-math.log1p(-(word + 0.5) / 2**32))
            assert noise[row, token].item() == pytest.approx(exact, rel=1e-4, abs=1e-4)


def test_noise_has_the_moments_of_a_gumbel_distribution():
    noise = gumbel_noise(torch.arange(40), torch.arange(40), 50_001).double()
    assert torch.isfinite(noise).all()
    assert noise.mean().item() == pytest.approx(0.5772157, abs=0.005)
    assert noise.var().item() == pytest.approx(math.pi**2 / 6, abs=0.02)


def test_noise_does_not_depend_on_the_other_rows_or_the_vocabulary():
    seeds, positions = torch.randint(-(2**63), 2**63 - 1, (9,)), torch.arange(9)
    together = gumbel_noise(seeds, positions, 1003)
    for row in range(9):
        alone = gumbel_noise(seeds[row : row + 1], positions[row : row + 1], 1003)
        assert torch.equal(alone[0], together[row])
    assert torch.equal(gumbel_noise(seeds, positions, 517), together[:, :517])


def test_the_largest_words_give_finite_noise():
    """Token 161979 of seed 235 draws 0xFFFFFFDE, which float32 rounds to 2^32."""
    noise = gumbel_noise(torch.tensor([235]), torch.tensor([0]), 161_980)
    assert philox_by_hand((161979 // 4, 0, 0, 0), (235, 0))[161979 % 4] == 0xFFFFFFDE
    assert torch.isfinite(noise).all()
    assert -2.9 < noise[0, -1].item() < -2.7

"""The judge of the soak for memory tells a leak from noise."""

import random

import pytest

from tests.support.soak.memory import MAX_GROWTH_MIB, growth_of

SECONDS = 900


@pytest.mark.parametrize(("leak_mib", "is_found"), [(0.0, False), (2.0, False), (6.0, True)])
def test_leaks_show_through_what_is_used_for_a_while(leak_mib, is_found):
    seed = random.randrange(1 << 30)
    print(f"seed {seed}")
    rng = random.Random(seed)
    samples = []
    for at in range(SECONDS):
        used = rng.choice([0.0, 0.0, 30.0]) + rng.uniform(0.0, 0.5)
        samples.append((float(at), 300.0 + used + leak_mib * at / SECONDS))
    growth = growth_of("driver", samples)
    assert growth.mib == pytest.approx(leak_mib, abs=1.0)
    assert (growth.mib > MAX_GROWTH_MIB) is is_found


def test_one_step_up_is_no_leak():
    samples = [(float(at), 300.0 + 20.0 * (at > 700)) for at in range(SECONDS)]
    assert growth_of("driver", samples).mib <= MAX_GROWTH_MIB

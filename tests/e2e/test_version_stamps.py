"""Each token is of the version of its stamp, and none is lost or doubled, over random updates under
load while drivers, ranks and trainers die. What transformers can tell has the same tokens."""

import random

import pytest

from tests.support.exhaustive import exhaustively
from tests.support.stamps.plan import CASES
from tests.support.stamps.run import run_case

pytestmark = pytest.mark.slow

DEATHS = {"driver in update": 1, "rank": 1}
MORE_DEATHS = {"driver": 2, "driver in update": 3, "rank": 1, "rank in update": 1, "trainer": 1}


@pytest.mark.parametrize(("num_updates", "deaths"), [(40, DEATHS), exhaustively(60, MORE_DEATHS)])
def test_stamps_are_exact_over_random_updates_and_deaths(num_updates, deaths):
    seed = random.randrange(1 << 30)
    name = random.Random(seed).choice([*CASES])
    findings = run_case(name, seed, num_updates, deaths)
    assert findings.num_tokens > num_updates
    assert findings.num_runs > findings.num_requests

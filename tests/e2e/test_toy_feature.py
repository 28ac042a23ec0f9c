"""A new feature is four files and their registration: a bias on every second token, with values for
each step, added to a copy of the tree; and one that takes several samples of a request in a step.
Daemons of the copy then serve both over a pipeline and with tensor parallelism, through preemption
and the death of a driver. Tokens are those of transformers' SequenceBiasLogitsProcessor, samples
transformers' most likely tokens at their positions."""

import pytest

from tests.support.exhaustive import exhaustively
from tests.support.forked_drivers import ForkedDrivers
from tests.support.toy_feature import (
    CHECKED_FILES,
    CHECKED_LINES,
    FILES,
    LINES,
    copy_with_the_feature,
)
from tests.support.toy_feature.checks import biased, check_serving, start_daemons


@pytest.fixture(scope="module")
def tree(tmp_path_factory):
    return copy_with_the_feature(tmp_path_factory.mktemp("tree"))


@pytest.fixture(scope="module")
def drivers(tree):
    with ForkedDrivers(tree) as drivers:
        yield drivers


@pytest.fixture(scope="module")
def daemons(tree, model_root):
    with start_daemons(tree, ["cpu", "cpu"], model_root) as daemons:
        yield daemons


@pytest.mark.parametrize(("pp", "tp"), [exhaustively(1, 1), (2, 1), (1, 2)])
def test_feature_in_its_own_files_serves_through_preemption_and_adoption(
    drivers, daemons, checkpoint, pp, tp
):
    plain, changed = checkpoint().greedy([1, 2, 3], 4), biased(checkpoint(), [1, 2, 3], 4, 5, 40.0)
    assert changed[::2] == [5, 5] and 5 not in plain
    check_serving(drivers, daemons.endpoints[: pp * tp], checkpoint(), tp)


def test_registration_is_a_line_a_place():
    """What docs/adding-a-feature.md promises."""
    assert len([name for name in FILES if name not in ("run.py", "plans.py")]) == 4
    assert len({line.path for line in LINES}) == 4
    assert sum(line.text.count("\n") or 1 for line in LINES) == 9
    assert len(CHECKED_FILES) == 4 and len(CHECKED_LINES) == 8

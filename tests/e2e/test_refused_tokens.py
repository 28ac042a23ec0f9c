"""Counts that are corrected: a feature, added to a copy of the tree, refuses tokens at random that
steps have counted, over a pipeline, through preemption and the death of a driver. Tokens are those
of transformers, as without it."""

import pytest

from tests.support.refusing_feature import copy_with_the_feature
from tests.support.refusing_feature.checks import check_serving
from tests.support.toy_feature.checks import start_daemons


@pytest.fixture(scope="module")
def tree(tmp_path_factory):
    return copy_with_the_feature(tmp_path_factory.mktemp("tree"))


@pytest.fixture(scope="module")
def daemons(tree, model_root):
    with start_daemons(tree, ["cpu", "cpu"], model_root) as daemons:
        yield daemons


@pytest.mark.parametrize("pp", [1, 2])
def test_tokens_that_were_refused_are_sampled_again(tree, daemons, checkpoint, pp):
    check_serving(tree, daemons.endpoints[:pp], checkpoint())

"""A feature added to a copy of the tree (tests/support/toy_feature) on a GPU: beside captured
graphs, through preemption and the death of a driver."""

import shutil
import tempfile
from pathlib import Path

import pytest

from tests.support.checkpoints import make_checkpoint
from tests.support.forked_drivers import ForkedDrivers
from tests.support.toy_feature import copy_with_the_feature
from tests.support.toy_feature.checks import check_serving, start_daemons


@pytest.fixture
def model_root():
    path = Path(tempfile.mkdtemp(prefix="wd-models-"))
    yield path
    shutil.rmtree(path)


def test_feature_serves_beside_graphs(tmp_path, model_root):
    checkpoint = make_checkpoint(model_root, "LlamaForCausalLM")
    tree = copy_with_the_feature(tmp_path)
    with start_daemons(tree, ["cuda:0"], model_root) as daemons, ForkedDrivers(tree) as drivers:
        check_serving(drivers, daemons.endpoints, checkpoint)

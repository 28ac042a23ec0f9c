"""docker/compose.vllm.yaml against vLLM's own options; the rest: tests/arch/test_deployment.py."""

import pytest
import yaml

from tests.vllm.serving import ROOT


def test_composed_command_is_one_that_vllm_takes():
    from vllm.entrypoints.common.cli_args import make_arg_parser
    from vllm.utils.argparse_utils import FlexibleArgumentParser

    composed = yaml.safe_load((ROOT / "docker" / "compose.vllm.yaml").read_text())
    words = composed["services"]["vllm"]["command"]
    parser = make_arg_parser(FlexibleArgumentParser())
    options = parser.parse_args(words)
    assert options.pipeline_parallel_size == 2
    assert options.middleware == ["worker_client.vllm.health.DaemonsHealth"]
    assert options.additional_config == {"worker_daemon": {"reload": True}}
    with pytest.raises(SystemExit):
        parser.parse_args([*words, "--no-such-option=1"])

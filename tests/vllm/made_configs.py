"""Makes vLLM's configuration of each line of arguments (JSON on standard input: a list of objects),
and prints what became of each: the platform's name, or the error."""

import json
import sys

import torch
from vllm import EngineArgs
from vllm.platforms import current_platform


def _refused_cuda() -> None:
    raise AssertionError("CUDA is to be initialized")


def main() -> None:
    torch.cuda._lazy_init = _refused_cuda
    results = []
    for arguments in json.load(sys.stdin):
        try:
            config = EngineArgs(**arguments).create_engine_config()
            results.append({"backend": str(config.parallel_config.distributed_executor_backend)})
        except Exception as error:
            results.append({"error": f"{type(error).__name__}: {error}"})
    platform = type(current_platform)
    print(json.dumps({"platform": f"{platform.__module__}.{platform.__name__}", "made": results}))


if __name__ == "__main__":
    main()

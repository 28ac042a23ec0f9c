"""`vllm` with a watch on CUDA: each initialisation that torch is asked for is written to the file
CUDA_CALLS. Forked processes are watched too."""

import os
import traceback
from pathlib import Path

import torch
from vllm.entrypoints.cli.main import main

_CALLS = Path(os.environ["CUDA_CALLS"])
_initialize = torch.cuda._lazy_init


def _watched() -> None:
    with _CALLS.open("a") as out:
        traceback.print_stack(file=out)
    _initialize()


if __name__ == "__main__":
    torch.cuda._lazy_init = _watched
    main()

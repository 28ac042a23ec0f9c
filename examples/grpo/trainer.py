"""`python -m examples.grpo.trainer DIRECTORY`: the trainer. It learns from each batch of a run as
soon as it is complete, from its newest policy on."""

import sys
import time
from pathlib import Path
from typing import Final

import torch

from examples.grpo.policy import Learner
from examples.grpo.run_files import RunFiles

POLL_S: Final = 0.005


def main() -> None:
    """Learn from what is left of a run. The same batches make the same policies: one thread adds
    up in one order."""
    torch.set_num_threads(1)
    torch.use_deterministic_algorithms(mode=True)
    files = RunFiles(Path(sys.argv[1]))
    settings = files.settings
    first = files.newest_policy()
    learner = Learner.load(files.policy(first), files.policy(0))
    for number in range(first, settings.num_updates):
        while not files.batch(number).exists():
            time.sleep(POLL_S)
        learner.update(files.read_batch(number))
        files.write_policy(number + 1, learner.save, settings.kept_policies)


if __name__ == "__main__":
    main()

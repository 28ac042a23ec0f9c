"""Run by test_saving: a process that is killed before the first, the second, ... file operation of
a save, until a save comes to its end. argv: the models' directory, the save root, the load_format.
Prints, for each death, what is there after it: checksums of the set, entries beside it, and entries
after another save; and what was unpickled in all this, by whomever."""

import gc
import itertools
import json
import os
import signal
import sys
from pathlib import Path

import torch
from worker_driver import WorkerDriver

from rpc_schema import lifecycle
from worker_daemon.worker.worker import Worker

STEPS = {"open", "os.mkdir", "os.rename", "os.remove", "os.rmdir", "shutil.rmtree"}
PATTERN = "part-{part}-of-{rank}.safetensors"


def load(models: Path, root: Path, model: str, **options: object) -> WorkerDriver:
    driver = WorkerDriver(Worker("cpu", [models], lambda phase, seconds, done=0.0: None, root))
    driver.init_device()
    driver.load_model(model, **options)
    return driver


def save(driver: WorkerDriver, name: str, load_format: str) -> None:
    identity = os.urandom(16)
    if load_format == "tensorizer":
        driver.worker.save_tensorized_model(
            lifecycle.SaveTensorizedModel(**driver.ids(), save=identity, name=name)
        )
    else:
        driver.worker.save_sharded_state(
            lifecycle.SaveShardedState(
                **driver.ids(), save=identity, name=name, pattern=PATTERN, max_size_bytes=20_000
            )
        )
    driver.worker.finish_sharded_state(
        lifecycle.FinishShardedState(**driver.ids(), save=identity, keep=True)
    )


def die_at(step: int) -> None:
    """Kill this process when it is about to take its step-th step in the file system."""
    steps = itertools.count()

    def hook(event: str, _: object) -> None:
        if event in STEPS and next(steps) == step:
            os.kill(os.getpid(), signal.SIGKILL)

    sys.addaudithook(hook)


def dies(driver: WorkerDriver, step: int, load_format: str) -> bool:
    """Save in a child that is to be killed; tell whether it was."""
    child = os.fork()
    if child == 0:
        die_at(step)
        save(driver, "set", load_format)
        os._exit(0)
    return os.waitpid(child, 0)[1] == signal.SIGKILL


def checksums(driver: WorkerDriver) -> dict[str, str]:
    message = lifecycle.ComputeWeightChecksums(**driver.ids())
    found = driver.worker.compute_weight_checksums(message).checksums
    return {name: value.hex() for name, value in found.items()}


def main(models: Path, root: Path, load_format: str) -> None:
    torch.set_num_threads(1)
    unpickled = []
    sys.addaudithook(lambda event, _: event.startswith("pickle.") and unpickled.append(event))
    gc.collect()
    gc.freeze()  # what was imported stays: workers collect garbage, and often
    home = root / "set"
    old, new = (load(models, root, name) for name in ("llama", "qwen"))
    found, entries, cleaned = [], [], []
    for step in itertools.count():
        save(old, "set", load_format)
        if not dies(new, step, load_format):
            break
        loaded = load(models, root, "set", load_format=load_format, verify_checksums=True)
        found.append(checksums(loaded))
        entries.append(len(list(home.iterdir())))
        save(old, "set", load_format)
        cleaned.append(len(list(home.iterdir())))
    report = {
        "checksums": found,
        "entries": entries,
        "entries_after_the_next_save": cleaned,
        "unpickled": unpickled,
    }
    print(json.dumps(report))


if __name__ == "__main__":
    main(Path(sys.argv[1]), Path(sys.argv[2]), sys.argv[3])

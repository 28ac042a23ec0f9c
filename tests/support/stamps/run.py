"""One run of a case: daemons that are started again when they have died, and one driver after the
other until the plan is done."""

import json
import shutil
import signal
import sys
from collections import Counter
from collections.abc import Callable, Mapping
from pathlib import Path

import msgspec

from rpc_schema.config import LoraConfig
from tests.support.checkpoints import Checkpoint
from tests.support.command_line import short_directory
from tests.support.forked_daemons import ForkedDaemons
from tests.support.forked_processes import ForkedPopen
from tests.support.lora_adapters import make_adapter
from tests.support.one_thread import one_thread
from tests.support.serving import drafts_by, worker_config
from tests.support.stamps.driver import Life
from tests.support.stamps.judge import Findings, judge
from tests.support.stamps.models import make_models
from tests.support.stamps.plan import CASES, MAX_MODEL_LEN, NUM_CONTENTS, Case, Death, name_of
from tests.support.stamps.record import read
from tests.support.structured import EOS_TOKEN_ID, VOCAB_SIZE, make_tokenizer

NUM_BLOCKS = 110
"""Too few for LOAD requests of the longest kind: some are preempted."""
STEP_DEADLINE_MS = 2000
MAX_LIVES = 500


def run_case(
    name: str,
    seed: int,
    num_updates: int,
    deaths: Mapping[Death, int],
    say: Callable[[str], object] = print,
) -> Findings:
    """Do a run; return its findings. AssertionError: a driver failed, or there is a fault."""
    case, directory = CASES[name], short_directory()
    say(f"{name}: seed {seed}, {num_updates} updates, {dict(deaths)}")
    models = make_models(
        directory,
        case.architecture,
        vocab_size=VOCAB_SIZE,
        eos_token_id=EOS_TOKEN_ID,
        **case.options,
    )
    adapted = _adapted(case, models)
    if case.grammars:
        make_tokenizer(models[0].path)
    drafts = drafts_by(case.drafts, models[0].path)
    config = worker_config(
        models[0].path,
        case.pp,
        case.tp,
        max_num_seqs=8,
        max_num_batched_tokens=32,
        max_model_len=MAX_MODEL_LEN,
        step_deadline_ms=STEP_DEADLINE_MS,
        lora=LoraConfig(max_loras=int(case.lora)),
        speculative=drafts,
        **case.config,
    )
    with ForkedDaemons(
        ["cpu"] * config.parallel.world_size, directory, lora_root=directory
    ) as daemons:
        life = Life(
            daemons.endpoints,
            config,
            NUM_BLOCKS,
            [str(model.path) for model in models],
            name,
            seed,
            num_updates,
            dict(deaths),
            str(directory / "record"),
        )
        (directory / "life.json").write_bytes(msgspec.json.encode(life))
        with daemons.kept_alive():
            exits = _drive(directory, say)
    entries = read(directory / "record")

    def reference(model: int, content: int | None) -> Checkpoint:
        return models[model] if content is None else adapted[model][content]

    with one_thread():
        findings = judge(entries, case, seed, reference)
    num_done = sum(entry.what == "updated" for entry in entries)
    killed = deaths.get("driver", 0) + deaths.get("driver in update", 0)
    say(json.dumps({**findings._asdict(), "faults": len(findings.faults), "exits": dict(exits)}))
    assert not findings.faults, "\n".join(findings.faults[:20])
    assert (num_done, exits[-signal.SIGKILL]) == (num_updates, killed)
    shutil.rmtree(directory)
    return findings


def _drive(directory: Path, say: Callable[[str], object]) -> Counter[int]:
    """Start drivers until one has done all; return their exit codes."""
    exits: Counter[int] = Counter()
    while not exits[0]:
        with (directory / "driver.log").open("ab") as log:
            words = [
                sys.executable,
                "-m",
                "tests.support.stamps.driver",
                str(directory / "life.json"),
            ]
            process = ForkedPopen(words, stdout=log, stderr=log)
            code = process.wait()
        exits[code] += 1
        text = (directory / "driver.log").read_text()
        assert code in (0, -signal.SIGKILL), (
            f"a driver ended with {code}; {directory}:\n{text[-6000:]}"
        )
        assert exits.total() < MAX_LIVES, text[-6000:]
    return exits


def _adapted(case: Case, models: list[Checkpoint]) -> list[list[Checkpoint]]:
    """Write the adapter with each of its contents, if the case has one; return each model with each
    of them merged."""
    if not case.lora:
        return []
    form = {"rank": 4, "alpha": 2.0, "targets": ("q_proj", "v_proj")}
    return [
        [
            make_adapter(model, name_of(content), seed=7 + content, **form)
            for content in range(NUM_CONTENTS)
        ]
        for model in models
    ]

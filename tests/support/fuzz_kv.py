"""KV blocks that are kept and moved, while bits flip and messages are dropped, doubled, delayed and
truncated, before and during transfers, weights and adapters change, and drivers and daemons die:
the host tier, its file, files, and prefill apart from decode. Requests must get the tokens of an
undisturbed group without a connector, and nothing may be left behind.

A case is a few fresh prompts, which run twice, and what goes wrong meanwhile. CASES_OF_A_SETTING
share a model and a group (kv_settings.py). All of it follows from the seed, but for the daemons'
timing: `make fuzz ARGS="--only kv --seed SEED"` begins with it.
"""

import contextlib
import faulthandler
import itertools
import json
import random
import shutil
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path

import pytest

from tests.support.checkpoints import prompts
from tests.support.kv_settings import (
    CONNECTORS,
    Model,
    Reference,
    Setting,
    Wanted,
)
from tests.support.kv_worlds import WORLDS, Side, World, eventually, num_held
from tests.support.serving import greedy_request
from tests.support.tmpfs import tmpfs_directory
from tests.support.wrong_transfers import WrongDaemons
from worker_client.driver_parts import remote_prefill

FILE_BYTES = 4 << 20
CASES_OF_A_SETTING = 40
CASE_S = 60.0
"""Time after which a case hangs: several times what it takes after a kill on a busy host."""
KILLS_ONE_OF = 37
"""Cases of which one kills daemons."""
LAST_STEP = 16


@dataclass(frozen=True)
class Prompt:
    """A request of a case, which each wave makes anew."""

    name: str
    tokens: tuple[int, ...]
    max_tokens: int
    is_adapted: bool


@dataclass(frozen=True)
class Case:
    """Prompts, and what goes wrong."""

    seed: int
    kills: bool
    rng: random.Random
    prompts: Sequence[Prompt]
    aborted: str
    """Prompt whose request is aborted; empty: none."""
    strikes: Mapping[tuple[int, int], int]
    """Number of strikes by wave and the step before which they are."""
    changes: Mapping[tuple[int, int], str]
    """Of CHANGES, by wave and step. Step 0 of wave 1 is between the waves."""

    @classmethod
    def of(cls, seed: int, setting: Setting, kills: bool) -> "Case":
        rng = random.Random(seed)
        stem = _tokens(rng, rng.randint(5, 34))
        made = []
        for index in range(rng.randint(1, 4)):
            own = _tokens(rng, rng.randint(2, 40))
            tokens = stem + own[:16] if rng.randrange(2) else own
            is_adapted = setting.has_adapter and bool(rng.randrange(2))
            max_tokens = rng.randint(1, rng.choice((4, 4, 14)))
            made.append(Prompt(f"{seed}-{index}", tokens, max_tokens, is_adapted))
        aborted = rng.choice(made).name if not rng.randrange(6) else ""
        steps = [(rng.randrange(2), rng.randrange(LAST_STEP)) for _ in range(rng.randint(1, 6))]
        changes = {}
        for kind, one_of in ONE_OF.items():
            if kind != "driver" and (kills or (kind in ADAPTED and not setting.has_adapter)):
                continue
            if not rng.randrange(one_of):
                place = rng.choice([(1, 0), (1, 0), (0, 3), (1, 2), (1, 5)])
                changes[(1, 0) if kind in BETWEEN else place] = kind
        return cls(seed, kills, rng, made, aborted, Counter(steps), changes)


ONE_OF = {
    "weights drop": 16,
    "weights recompute": 24,
    "adapter files": 5,
    "adapter update": 5,
    "driver": 10,
    "sleep": 24,
}
"""Changes, and of how many cases one has each. Those that kill daemons have only drivers: another
change fails if a daemon dies meanwhile."""
ADAPTED = ("adapter files", "adapter update")
BETWEEN = ("sleep", "adapter files")
"""Those for which no request may wait: one that does names the adapter's files of before."""


def _tokens(rng: random.Random, count: int) -> tuple[int, ...]:
    return tuple(prompts(rng.randrange(1 << 30), [count])[0].tolist())


class Wave:
    """The requests of a wave, and what weights their tokens are of."""

    def __init__(self, world: World, case: Case, number: int) -> None:
        self._world, self._case, self._number = world, case, number
        self._prompts = {f"{each.name}-{number}": each for each in case.prompts}
        self._sent: list[str] = []
        """Requests so far, in their order."""
        self._contents: dict[str, int] = {}
        """Content that the files of each request's adapter had."""
        self.outputs = {}
        self._aborted: set[str] = set()

    def run(self, until: float) -> None:
        """Run them, while things go wrong. Raises AssertionError: it takes longer than until."""
        world, case = self._world, self._case
        kill_at = case.rng.randrange(LAST_STEP) if case.kills and self._number else -1
        order = [*self._prompts]
        case.rng.shuffle(order)
        self._add(order)
        self._sent = order
        for step in itertools.count():
            place = self._number, step
            if step == kill_at:
                world.kill(case)
            if place in case.changes and (step or not self._number):
                self.change(case.changes[place])
            for _ in range(case.strikes.get(place, 0)):
                world.counts[world.strike(case)] += 1
            if step == LAST_STEP // 4 and case.aborted:
                self._abort(f"{case.aborted}-{self._number}")
            if not world.driver.busy:
                break
            assert time.monotonic() < until, "the case hangs"
            self._take(world.driver.step())
        self._take(world.driver.run())

    def change(self, kind: str) -> None:
        """Change weights, an adapter or the driver."""
        world, case = self._world, self._case
        if kind == "driver":
            self._take_over()
        elif kind == "sleep":
            world.group.memory.sleep(1)
            world.group.memory.wake_up()
            world.driver.scheduler.forget_prefixes()
        elif kind == "adapter files":
            world.replace_adapter()
        elif kind == "adapter update":
            world.update_adapter(running="drop")
        else:
            world.update(case.rng, kind.split()[1])
        world.counts[kind] += 1

    def _add(self, names: Sequence[str]) -> None:
        world = self._world
        for name in names:
            prompt, features = self._prompts[name], ()
            if prompt.is_adapted:
                features = (world.adapter.extension,)
                self._contents[name] = world.adapter_content
            request = greedy_request(name, prompt.tokens, prompt.max_tokens, features=features)
            world.driver.add_request(request)

    def _abort(self, name: str) -> None:
        self._aborted.add(name)
        self._world.driver.abort_request(name)

    def _take(self, outputs) -> None:
        self.outputs |= {each.req_id: each for each in outputs}

    def _take_over(self) -> None:
        """Let another driver go on with what this one leaves."""
        world = self._world
        world.take_over()
        driver = world.driver
        adopted, lost = driver.claim(world.group.adopt_requests())
        assert not lost, lost
        known = {each.req_id for each in adopted}
        assert known <= self._prompts.keys() | {f"{self._case.seed}-evict"}, known
        self._take(driver.scheduler.adopt_requests(adopted))
        world.counts["adopted requests"] += len(known)
        for name in self._aborted:
            driver.abort_request(name)
        known |= self.outputs.keys() | self._aborted
        self._add([name for name in self._sent if name not in known])

    def check(self, reference: Reference, cache: dict[Wanted, object]) -> None:
        """Compare tokens. cache: the reference's, of this case."""
        world, spans = self._world, {}
        for name, prompt in self._prompts.items():
            output = self.outputs.pop(name, None)
            if output is None:
                assert name in self._aborted, f"no output of {name}"
                continue
            assert not output.error, (name, output.error)
            if name not in self._aborted:
                assert len(output.token_ids) == prompt.max_tokens, (name, output)
                spans[name] = self._spans(name, output)
            world.counts["loaded tokens"] += output.num_loaded_tokens
            world.counts["preemptions"] += output.num_preemptions
        assert not self.outputs, self.outputs
        missing = {wanted for each in spans.values() for wanted, _ in each} - cache.keys()
        cache |= reference.tokens(sorted(missing, key=repr))
        for name, each in spans.items():
            for wanted, found in each:
                right = cache[wanted]
                some = right.tokens[: right.num_clear]
                assert found[: right.num_clear] == some, (name, found, right, wanted)
                if right.num_clear < len(right.tokens):
                    break  # what follows may be other tokens, too
            world.counts["outputs"] += 1
            world.counts["outputs of several weights"] += len(each) > 1

    def _spans(self, name: str, output) -> list[tuple[Wanted, list[int]]]:
        """The tokens of an output by the weights that they are of."""
        world, prompt, spans = self._world, self._prompts[name], []
        known, left = prompt.tokens, list(output.token_ids)
        for run in output.weights_versions:
            weights = world.weights_of.get(run.version)
            if weights is None:
                assert run.version is None, run
                break
            content = self._contents.get(name)
            if run.adapter_version:
                content = world.contents_of[run.adapter_version]
            found, left = left[: run.num_tokens], left[run.num_tokens :]
            spans.append((Wanted(weights, content, known, len(found)), found))
            known += tuple(found)
        return spans


@dataclass
class Fuzzer:
    """Runs cases, in the world of a setting."""

    world: World
    reference: Reference

    def run(self, seed: int, kills: bool) -> None:
        """Run a case. Raises AssertionError, which names the seed."""
        world, case = self.world, Case.of(seed, self.world.setting, kills)
        try:
            self._run(case)
        except BaseException as error:
            error.add_note(f"seed {seed}, kills: {kills}, {world.setting}, {case.changes}")
            raise
        world.counts["cases"] += 1
        world.counts["cases with kills"] += kills
        for kind in world.setting.kinds:
            world.counts[kind] += 1

    def _run(self, case: Case) -> None:
        world, cache = self.world, {}
        num_free = world.driver.scheduler.num_free_blocks
        world.may_die = case.kills
        if case.kills:
            world.read_files()
        world.prepare(case)
        until = time.monotonic() + CASE_S
        for number in range(2):
            wave = Wave(world, case, number)
            if number:
                world.between_waves(case)
                if (1, 0) in case.changes:
                    wave.change(case.changes[1, 0])
            wave.run(until)
            wave.check(self.reference, cache)
        world.settle()
        if "driver" in case.changes.values():  # its first step drops what it has not adopted
            world.evict(case)
        if case.kills:
            world.driver.look()  # after a death that no step has met
        assert not world.deaths, "\n".join(world.deaths)
        assert world.driver.scheduler.num_free_blocks == num_free, "the scheduler holds blocks"
        eventually(lambda: num_held(world.group), "blocks of ended requests")
        world.check()
        world.driver.scheduler.forget_prefixes()


class Places:
    """Daemons for groups, started when they are first needed, and kept."""

    def __init__(self, stack: contextlib.ExitStack, models: Path, kept: Path) -> None:
        self._stack, self._models, self._kept = stack, models, kept
        self._started: dict[tuple[str, int], WrongDaemons] = {}

    def sides(self, setting: Setting) -> list[Side]:
        """Those of a setting's groups."""
        names = ["own"] if setting.connector != "tier" else ["plain"]
        if setting.connector == "peers":
            names.insert(0, "others" if setting.is_kept else "plain")
        return [
            Side(self._get(name, pp * tp), (pp, tp))
            for name, (pp, tp) in zip(names, setting.shapes, strict=True)
        ]

    def _get(self, name: str, size: int) -> WrongDaemons:
        if (name, size) not in self._started:
            own = f"{name}-{size}"
            directory = self._models.with_name(f"{self._models.name}-{own}")
            directory.mkdir()
            kept = None
            if name != "plain":
                kept = self._kept / own
                kept.mkdir(mode=0o700)
            made = WrongDaemons(size, self._models, directory, kept, FILE_BYTES)
            self._started[name, size] = self._stack.enter_context(made)
        return self._started[name, size]


@dataclass
class Found:
    """Counts of all settings so far."""

    by_connector: dict[str, Counter[str]] = field(default_factory=dict)
    num_settings: int = 0

    def add(self, world: World) -> None:
        """Add those of a world, and set them to 0."""
        own = self.by_connector.setdefault(world.setting.connector, Counter())
        own.update(world.counts)
        world.counts.clear()

    @property
    def num_cases(self) -> int:
        return sum(own["cases"] for own in self.by_connector.values())

    def summary(self) -> dict[str, object]:
        """Counts by connector, in an order that can be read."""
        return {name: dict(sorted(own.items())) for name, own in sorted(self.by_connector.items())}


@contextlib.contextmanager
def _opened() -> Iterator[tuple[Places, Path, Reference]]:
    directory = Path(tempfile.mkdtemp(prefix="fk-"))
    with contextlib.ExitStack() as stack:
        stack.callback(shutil.rmtree, directory)
        kept = stack.enter_context(tmpfs_directory())
        patch = stack.enter_context(pytest.MonkeyPatch.context())
        patch.setattr(remote_prefill, "RETRY_S", 0.01)
        models = directory / "models"
        models.mkdir()
        yield Places(stack, models, kept), models, Reference(stack, models)


def fuzz_count(
    is_enough: Callable[[int], bool],
    seed: int,
    kills_one_of: int = KILLS_ONE_OF,
    find_setting: Callable[[int], Setting] = Setting.of,
    cases_of_a_setting: int = CASES_OF_A_SETTING,
    on_setting: Callable[[Found], None] = lambda _: None,
) -> dict[str, dict[str, int]]:
    """Run cases from this seed on until is_enough(number of cases); return the counts by connector.
    kills_one_of: 0 kills nothing. find_setting: returns that of a number. on_setting: is told what
    was found when a setting ends.

    Raises AssertionError, with the seed of the case: a request had other tokens, or an error;
    blocks or slots are held by nobody; or it took longer than CASE_S."""
    found, number, made = Found(), 0, dict[tuple[str, bool], Model]()
    with _opened() as (places, models, reference):
        while not is_enough(number):
            setting = find_setting((seed + number) // cases_of_a_setting)
            kind = setting.model, setting.is_fp8
            model = made.setdefault(kind, Model(*kind, models))
            world = WORLDS[setting.connector](setting, model, places.sides(setting))
            reference.serve(setting, model)
            with contextlib.closing(world):
                world.open()
                fuzzer = Fuzzer(world, reference)
                while True:
                    faulthandler.dump_traceback_later(4 * CASE_S, exit=True)
                    kills = bool(kills_one_of) and not (seed + number) % kills_one_of
                    fuzzer.run(seed + number, kills)
                    faulthandler.cancel_dump_traceback_later()
                    number += 1
                    if is_enough(number) or (seed + number) % cases_of_a_setting == 0:
                        break
            found.add(world)
            found.num_settings += 1
            on_setting(found)
    return found.summary()


def fuzz(seconds: float, seed: int) -> dict[str, object]:
    """Run cases for so long; return the counts. Raises as fuzz_count does."""
    began: list[float] = []

    def is_enough(number: int) -> bool:
        if not began:  # daemons and models are there
            began.append(time.monotonic())
        return time.monotonic() > began[0] + seconds

    return dict(fuzz_count(is_enough, seed))


if __name__ == "__main__":
    seconds, first, kills, *only = sys.argv[1:]
    began = time.monotonic()

    def show(found):
        rate = found.num_cases / (time.monotonic() - began)
        print(found.num_cases, round(rate, 1), "a second", flush=True)
        if found.num_settings % 20 == 0:
            print(json.dumps(found.summary()), flush=True)

    wanted = partial(Setting.of, connectors=only or CONNECTORS)
    over = lambda _: time.monotonic() > began + float(seconds)  # noqa: E731
    print(json.dumps(fuzz_count(over, int(first), int(kills), wanted, on_setting=show)))

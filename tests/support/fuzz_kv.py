"""KV blocks that are kept and moved, while bits flip and messages are dropped, doubled, delayed and
truncated, before and during transfers, and daemons are killed: the host tier, files, and prefill
apart from decode. Requests must get the tokens of an undisturbed group without a connector, and
nothing may be left behind.

A case is a few fresh prompts, which run twice, and what goes wrong meanwhile. All of it follows
from its seed, but for the daemons' timing: `make fuzz ARGS="--only kv --seed SEED"` begins with it.
"""

import contextlib
import faulthandler
import itertools
import random
import shutil
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

import pytest

from tests.support.checkpoints import LEAST_MARGIN, make_checkpoint, prompts
from tests.support.filing_daemons import HEADER_BYTES, FilingDaemons, damage
from tests.support.forked_daemons import ForkedDaemons
from tests.support.secured import ask
from tests.support.serving import connect, greedy_request, kill_and_wait, worker_config
from tests.support.tier_damage import ALIVE, DEAD, TierFile
from tests.support.tiered_waves import new_driver
from tests.support.tmpfs import tmpfs_directory
from tests.support.wrong_transfers import WrongDaemons, Wrongs
from worker_client.driver_parts import remote_prefill
from worker_client.driver_parts.registry import DriverOptions
from worker_client.errors import DeadlineExceeded, WorkerDied
from worker_client.inputs.sampling_params import SamplingParams
from worker_client.replicas.prefill_group import PrefillThread
from worker_client.wire.keys import NO_KEYS

CONFIG = {"max_model_len": 64, "max_num_batched_tokens": 32}
"""Prompts in several chunks."""
FEW_BLOCKS = 18
"""Blocks of a KV cache that evicts and preempts."""
HOST_BYTES = 1 << 20
FILE_BYTES = 4 << 20
MOVE_TIMEOUT_S = 0.6
"""Time after which a message that was dropped ends its transfer link."""
CASE_S = 60.0
"""Time after which a case hangs: several times what it takes after a kill on a busy host."""
SETTLE_S = 20.0
KILLS_ONE_OF = 40
"""Cases of which one kills daemons."""
LAST_STEP = 16
FILE_KINDS = ("damage", "flip", "flip", "remove", "obstacle")
MESSAGE_KINDS = ("flip", "flip", "flip", "delay", "truncate", "truncate", "double", "drop")


@dataclass(frozen=True)
class Case:
    """Prompts, and what goes wrong."""

    seed: int
    kills: bool
    rng: random.Random
    requests: Sequence[object]
    aborted: str
    """Request that is aborted; empty: none."""
    strikes: Mapping[int, int]
    """Number of strikes by the step before which they are."""

    @classmethod
    def of(cls, seed: int, kills: bool) -> "Case":
        rng = random.Random(seed)
        stem = prompts(rng.randrange(1 << 30), [rng.randint(5, 34)])[0].tolist()
        requests = []
        for index in range(rng.randint(1, 4)):
            own = prompts(rng.randrange(1 << 30), [rng.randint(2, 40)])[0].tolist()
            tokens = stem + own[:16] if rng.randrange(2) else own
            requests.append(greedy_request(f"{seed}-{index}", tokens, rng.randint(1, 6)))
        aborted = rng.choice(requests).id if not rng.randrange(6) else ""
        strikes = Counter(rng.randrange(LAST_STEP) for _ in range(rng.randint(1, 4)))
        return cls(seed, kills, rng, requests, aborted, strikes)


class Reference:
    """A group without a connector, that nothing disturbs."""

    def __init__(self, stack: contextlib.ExitStack, model_root: Path, model: Path) -> None:
        daemons = stack.enter_context(ForkedDaemons(["cpu"], model_root))
        served = connect(daemons.endpoints, worker_config(model, **CONFIG))
        self._driver = new_driver(*stack.enter_context(served))

    def tokens(self, requests: Sequence[object]) -> dict[str, list[int]]:
        """The tokens of requests, without those that rounding could change."""
        wanted = SamplingParams(temperature=0.0, logprobs=2)
        for request in requests:
            self._driver.add_request(replace(request, sampling=wanted))
        outputs = list(self._driver.run())
        self._driver.scheduler.forget_prefixes()
        return {each.req_id: each.token_ids for each in outputs if _is_clear(each)}


def _is_clear(output) -> bool:
    return all(each.logprobs[1] - each.logprobs[2] > LEAST_MARGIN for each in output.logprobs)


class World:
    """A group with a connector and its driver, for many cases."""

    def __init__(self, name: str, model_root: Path, model: Path) -> None:
        self.name = name
        self.model_root, self.model = model_root, model
        self.counts: Counter[str] = Counter()
        self.sides: list[ForkedDaemons] = []
        """The daemons that can be killed, of each group."""
        self.may_die = False
        self.deaths: list[str] = []
        """Daemons that have died by themselves, and the ends of their logs."""

    def open(self, stack: contextlib.ExitStack, directory: Path, kept: Path) -> None:
        """Start the daemons, and open the driver."""
        raise NotImplementedError

    def prepare(self, case: Case) -> None:
        """Begin a case."""

    def strike(self, case: Case) -> str:
        """Let something go wrong, and name it."""
        raise NotImplementedError

    def between_waves(self, case: Case) -> None:
        """Let the second wave load what the first one has left, by a prompt that evicts it from the
        KV cache."""
        prompt = prompts(case.rng.randrange(1 << 30), [60])[0].tolist()
        self.driver.add_request(greedy_request(f"{case.seed}-between", prompt, 1))
        assert not [output.error for output in self.driver.run() if output.error]

    def strike_dead(self, case: Case) -> None:
        """Damage what dead daemons have left."""

    def settle(self) -> None:
        """Undo what goes wrong, and wait until nothing is on its way."""

    def check(self) -> None:
        """Assert that nothing is left behind elsewhere."""

    def connected(self, side: ForkedDaemons, shape: tuple[int, int], **config: object):
        """Serve the model, with a small KV cache."""
        wanted = worker_config(self.model, *shape, **CONFIG, **config)
        return connect(side.endpoints, wanted, num_gpu_blocks=FEW_BLOCKS)

    def recovering(self, side: ForkedDaemons, group: object) -> Callable[[object], None]:
        """What a driver calls after a death."""

        def recover(died):
            if not self.may_die:
                self.deaths.append(f"{died}\n{side.log_tail(died.rank)}")
            side.restart_dead()
            group.replace(died.rank)

        return recover

    def kill(self, case: Case) -> None:
        """Kill a daemon, or all of a side."""
        side = case.rng.choice(self.sides)
        pids = list(side.pids)
        for pid in pids if not case.rng.randrange(3) else [case.rng.choice(pids)]:
            with contextlib.suppress(ProcessLookupError):  # it has died among messages
                kill_and_wait(pid)
        self.strike_dead(case)


class TierWorld(World):
    """A group with a host tier that outlives its daemons."""

    def __init__(self, name, model_root, model, pp, tp):
        super().__init__(name, model_root, model)
        self._shape = pp, tp

    def open(self, stack, directory, kept):
        pp, tp = self._shape
        daemons = FilingDaemons(pp * tp, self.model_root, kept, option="--kv-host-dir")
        self.sides = [stack.enter_context(daemons)]
        served = self.connected(daemons, self._shape, kv_host_memory_bytes=HOST_BYTES)
        group, loaded = stack.enter_context(served)
        self.driver = new_driver(group, loaded, recover=self.recovering(daemons, group))
        self._files = [TierFile(own, loaded.num_host_blocks) for own in daemons.directories]

    def strike(self, case):
        kind = case.rng.choice(ALIVE)
        self._damage(case, kind)
        return kind

    def strike_dead(self, case):
        # Only of daemons that have ended: a file that is mapped must not be shortened.
        for pid, file in zip(self.sides[0].pids, self._files, strict=True):
            if not _is_alive(pid) and case.rng.randrange(2):
                file.damage(case.rng, case.rng.choice(DEAD), slots_of(self.driver))

    def _damage(self, case, kind):
        case.rng.choice(self._files).damage(case.rng, kind, slots_of(self.driver))


class FilesWorld(World):
    """A group whose blocks are kept in files."""

    def __init__(self, name, model_root, model, pp, tp):
        super().__init__(name, model_root, model)
        self._shape = pp, tp

    def open(self, stack, directory, kept):
        pp, tp = self._shape
        options = ("--kv-file-bytes", str(FILE_BYTES))
        daemons = FilingDaemons(pp * tp, self.model_root, directory, *options)
        self._daemons = stack.enter_context(daemons)
        self.sides = [daemons]
        served = self.connected(daemons, self._shape, kv_files=True)
        group, loaded = stack.enter_context(served)
        self.driver = new_driver(group, loaded, recover=self.recovering(daemons, group))

    def strike(self, case):
        kind, rng = case.rng.choice(FILE_KINDS), case.rng
        files = []
        with contextlib.suppress(OSError):  # a rank has just removed a directory
            files = self._daemons.files
        if not files:
            return "nothing"
        files = sorted(files, key=_age)[-60:]
        path = rng.choice(files)
        with contextlib.suppress(OSError):  # a rank has just removed it
            if kind == "damage":
                damage(rng, path)
            elif kind == "flip":
                for each in rng.sample(files, min(len(files), rng.choice([1, 5, 20]))):
                    flip(rng, each)
            elif kind == "remove":
                path.unlink()
            else:  # where the next blocks are to be
                place = path.parent.parent / f"{rng.randrange(256):02x}"
                if not place.exists():
                    place.write_bytes(b"")
        return kind

    def strike_dead(self, case):
        for _ in range(case.rng.randrange(6)):
            self.strike(case)

    def between_waves(self, case):
        self.driver.scheduler.forget_prefixes()

    def settle(self):
        for own in self._daemons.directories:
            for path in own.glob("*/??"):
                if path.is_file():
                    path.unlink()


class PeersWorld(World):
    """A group that decodes, and one that computes its prompts."""

    def __init__(self, name, model_root, model, source, destination):
        super().__init__(name, model_root, model)
        self._shapes = source, destination

    def open(self, stack, directory, kept):
        for name, (pp, tp) in zip(("source", "destination"), self._shapes, strict=True):
            (directory / name).mkdir()
            own = WrongDaemons(pp * tp, self.model_root, directory / name, kept / name)
            self.sides.append(stack.enter_context(own))
        sources, own = self.sides
        self._prefill_driver = None

        @contextlib.contextmanager
        def open_driver():
            sources.restart_dead()
            with self._opened(sources, self._shapes[0]) as driver:
                self._prefill_driver = driver
                yield driver

        thread = PrefillThread(open_driver, timeout_s=MOVE_TIMEOUT_S, reopen_s=0.05)
        prefill = stack.enter_context(thread)
        prefill.wait_opened()
        self._prefill = prefill
        options = DriverOptions(prefill=prefill)
        self.driver = stack.enter_context(self._opened(own, self._shapes[1], options=options))
        self._files = [
            [TierFile(own, _num_slots(endpoint)) for own, endpoint in zip(*each, strict=True)]
            for each in ((side.directories, side.endpoints) for side in self.sides)
        ]

    @contextlib.contextmanager
    def _opened(self, side, shape, **options):
        with self.connected(side, shape, kv_host_memory_bytes=HOST_BYTES) as (group, loaded):
            yield new_driver(group, loaded, recover=self.recovering(side, group), **options)

    def between_waves(self, case):
        super().between_waves(case)
        if case.rng.randrange(2):  # have all blocks sent again
            self.driver.scheduler.forget_prefixes()
            self.driver.scheduler.forget_host_tier()

    def prepare(self, case):
        kinds = [kind for kind in MESSAGE_KINDS if case.rng.randrange(3)]
        for wrongs in self.sides[0].wrongs:
            seed, one_of = case.rng.randrange(1 << 30), case.rng.choice([1, 2, 4, 8])
            wrongs.put(Wrongs(seed, kinds, one_of, case.rng.choice([1, 1, 2, 4])))
        if case.kills and case.rng.randrange(2):
            side = case.rng.choice(self.sides)
            wrongs = Wrongs(case.rng.randrange(1 << 30), ("kill",), case.rng.choice([1, 3, 6]))
            case.rng.choice(side.wrongs).put(wrongs)

    def strike(self, case):
        place, kind = case.rng.randrange(2), case.rng.choice(ALIVE)
        driver = self.driver if place else self._prefill_driver
        case.rng.choice(self._files[place]).damage(case.rng, kind, slots_of(driver))
        return kind

    def settle(self):
        for wrongs in [each for side in self.sides for each in side.wrongs]:
            wrongs.put(Wrongs())
            self.counts.update(f"message {kind}" for kind in wrongs.take_noted())

    def check(self):
        _eventually(self._num_coming, "slots that come")
        _eventually(lambda: self._prefill_driver.scheduler.exchange.num_slots, "slots that go")
        for endpoint in self.sides[0].endpoints:
            _eventually(lambda endpoint=endpoint: self._num_held(endpoint), "blocks of prompts")

    def _num_held(self, endpoint):
        try:
            return ask(endpoint, NO_KEYS, lambda client: client.get_status().num_kv_blocks_held)
        except (DeadlineExceeded, WorkerDied):
            if not self.may_die:
                raise
            return 1  # its successor is not there yet

    def _num_coming(self):
        self.driver.step()  # a driver that does nothing sees no move end
        return self.driver.scheduler.exchange.num_slots


def flip(rng: random.Random, path: Path) -> None:
    """Change some bits of a block in a file, unless it was cut before."""
    raw = bytearray(path.read_bytes())
    if len(raw) <= HEADER_BYTES:
        return
    for _ in range(rng.choice([1, 2, 64, 512])):
        raw[rng.randrange(HEADER_BYTES, len(raw))] ^= 1 << rng.randrange(8)
    path.write_bytes(raw)


def _age(path: Path) -> int:
    try:
        return path.lstat().st_mtime_ns
    except OSError:
        return 0


def _is_alive(pid: int) -> bool:
    try:
        return (Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]) != "Z"
    except OSError:
        return False


def _num_slots(endpoint: str) -> int:
    return ask(endpoint, NO_KEYS, lambda client: client.get_status().host_tier.num_slots)


def _num_held(group) -> int:
    """Of all ranks: those that do not answer steps may lag behind."""
    return sum(status.num_kv_blocks_held for status in group.get_status())


def _eventually(count: Callable[[], int], what: str) -> None:
    until = time.monotonic() + SETTLE_S
    while count():
        assert time.monotonic() < until, f"{what} are held"
        time.sleep(0.002)


def slots_of(driver) -> list[int]:
    """The slots of a driver's tier that were used last."""
    if driver is None:
        return []
    return [*driver.scheduler.exchange._tier._slot_of.values()][-60:]


@dataclass
class Fuzzer:
    """Runs cases, each in the world that its seed names."""

    worlds: Sequence[World]
    reference: Reference
    kills_one_of: int = KILLS_ONE_OF
    counts: Counter[str] = field(default_factory=Counter)

    def run(self, seed: int) -> None:
        """Run a case. Raises AssertionError, which names the seed."""
        world = self.worlds[seed % len(self.worlds)]
        kills = bool(self.kills_one_of) and seed // len(self.worlds) % self.kills_one_of == 0
        case = Case.of(seed, kills)
        try:
            self._run(world, case)
        except BaseException as error:
            error.add_note(f"{world.name}: seed {seed}, kills: {kills}")
            raise
        world.counts["cases"] += 1
        world.counts["cases with kills"] += kills

    def _run(self, world: World, case: Case) -> None:
        expected = self.reference.tokens(case.requests)
        num_free = world.driver.scheduler.num_free_blocks
        world.may_die = case.kills
        world.prepare(case)
        until = time.monotonic() + CASE_S
        for wave in range(2):
            if wave:
                world.between_waves(case)
            requests = [replace(each, id=f"{each.id}-{wave}") for each in case.requests]
            case.rng.shuffle(requests)
            kill_at = case.rng.randrange(LAST_STEP) if case.kills and wave else -1
            outputs = self._wave(world, case, requests, until, kill_at)
            for request in case.requests:
                output = outputs.pop(f"{request.id}-{wave}", None)
                if output is None:
                    assert request.id == case.aborted, f"no output of {request.id}"
                    continue
                assert not output.error, (request.id, output.error)
                if request.id in expected and request.id != case.aborted:
                    found = output.token_ids
                    assert found == expected[request.id], (request.id, wave, found, expected)
                    world.counts["outputs"] += 1
                world.counts["loaded tokens"] += output.num_loaded_tokens
            assert not outputs, outputs
        world.settle()
        if case.kills:
            world.driver.look()  # after a death that no step has met
        assert not world.deaths, "\n".join(world.deaths)
        assert world.driver.scheduler.num_free_blocks == num_free, "the scheduler holds blocks"
        _eventually(lambda: _num_held(world.driver.group), "blocks of ended requests")
        world.check()
        world.driver.scheduler.forget_prefixes()

    def _wave(self, world, case, requests, until, kill_at):
        driver, outputs = world.driver, {}
        for request in requests:
            driver.add_request(request)
        for step in itertools.count():
            if step == kill_at:
                world.kill(case)
            for _ in range(case.strikes.get(step, 0)):
                world.counts[world.strike(case)] += 1
            if step == LAST_STEP // 4 and case.aborted:
                for request in [each for each in requests if each.id.startswith(case.aborted)]:
                    driver.abort_request(request.id)
            if not driver.busy:
                break
            assert time.monotonic() < until, "the case hangs"
            outputs |= {each.req_id: each for each in driver.step()}
        return outputs | {each.req_id: each for each in driver.run()}


def _worlds(model_root: Path, model: Path) -> list[World]:
    return [
        TierWorld("tier", model_root, model, 1, 1),
        FilesWorld("files", model_root, model, 1, 1),
        PeersWorld("peers", model_root, model, (1, 1), (1, 1)),
        TierWorld("tier of 1 x 2", model_root, model, 1, 2),
        FilesWorld("files of 2 x 1", model_root, model, 2, 1),
        PeersWorld("peers of 1 x 2 to 1 x 1", model_root, model, (1, 2), (1, 1)),
        PeersWorld("peers of 1 x 1 to 2 x 1", model_root, model, (1, 1), (2, 1)),
    ]


@contextlib.contextmanager
def _opened(names: Sequence[str], kills_one_of: int) -> Iterator[Fuzzer]:
    directory = Path(tempfile.mkdtemp(prefix="fk-"))
    with contextlib.ExitStack() as stack:
        stack.callback(shutil.rmtree, directory)
        kept = stack.enter_context(tmpfs_directory())
        patch = stack.enter_context(pytest.MonkeyPatch.context())
        patch.setattr(remote_prefill, "RETRY_S", 0.01)
        model = make_checkpoint(directory, seed=5).path
        worlds = [each for each in _worlds(directory, model) if not names or each.name in names]
        for number, world in enumerate(worlds):
            (directory / str(number)).mkdir()
            (kept / str(number)).mkdir(mode=0o700)
            world.open(stack, directory / str(number), kept / str(number))
        yield Fuzzer(worlds, Reference(stack, directory, model), kills_one_of)


def fuzz_count(
    is_enough: Callable[[int], bool],
    seed: int,
    names: Sequence[str] = (),
    kills_one_of: int = KILLS_ONE_OF,
) -> dict[str, object]:
    """Run cases from this seed on until is_enough(number of cases); return the counts of each
    world. names: of the worlds; none: all. kills_one_of: 0 kills nothing.

    Raises AssertionError, with the seed of the case: a request had other tokens, or an error;
    blocks or slots are held by nobody; or it took longer than CASE_S."""
    with _opened(names, kills_one_of) as fuzzer:
        for number in itertools.count():
            if is_enough(number):
                return {world.name: dict(world.counts) for world in fuzzer.worlds}
            faulthandler.dump_traceback_later(4 * CASE_S, exit=True)
            fuzzer.run(seed + number)
            faulthandler.cancel_dump_traceback_later()
    raise AssertionError("cases do not end")


def fuzz(seconds: float, seed: int) -> dict[str, object]:
    """Run cases for so long; return the counts. Raises as fuzz_count does."""
    began: list[float] = []

    def is_enough(number: int) -> bool:
        if not began:  # daemons and models are there
            began.append(time.monotonic())
        return time.monotonic() > began[0] + seconds

    return fuzz_count(is_enough, seed)


if __name__ == "__main__":
    seconds, first, kills, *only = sys.argv[1:]
    ends: list[float] = []

    def over(number):
        ends.append(time.monotonic())
        if number and number % 100 == 0:
            print(number, round(number / (ends[-1] - ends[0]), 1), "a second", flush=True)
        return ends[-1] > ends[0] + float(seconds)

    print(fuzz_count(over, int(first), only, int(kills)))

"""Groups whose KV blocks are kept and moved, for the fuzzer (fuzz_kv.py), and what can go wrong
with them: the host tier, its file, files of blocks, and prefill apart from decode."""

import contextlib
import os
import random
import resource
import signal
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from rpc_schema.weight_transfer import DiskEngine, DiskSource
from tests.support.checkpoints import prompts
from tests.support.filing_daemons import HEADER_BYTES, damage
from tests.support.kv_settings import Model, Setting, few_blocks
from tests.support.secured import ask
from tests.support.serving import LONG_LEASE, greedy_request, kill_and_wait
from tests.support.tier_damage import ALIVE, DEAD, TierFile
from tests.support.tiered_waves import new_driver
from tests.support.wrong_transfers import SLOT_KINDS, WrongDaemons, Wrongs
from worker_client.driver_parts.registry import DriverOptions
from worker_client.errors import DeadlineExceeded, WorkerDied
from worker_client.group.weights_state import common_version
from worker_client.replicas.prefill_group import PrefillThread
from worker_client.wire.keys import NO_KEYS
from worker_client.wire.worker_client import TensorList
from worker_client.worker_group import WorkerGroup

MOVE_TIMEOUT_S = 0.6
"""Time after which a message that was dropped ends its transfer link."""
REOPEN_S = 0.05
ATTACH_WAIT_S = 30.0
"""Time in which the successor of a daemon answers."""
MANY_BLOCKS = 256
"""Of a KV cache whose groups are not known yet."""
STALL_S = 0.3
SETTLE_S = 60.0
FULL_BYTES = 1000
"""The longest file on a disk that is full: shorter than that of a block."""
FILE_KINDS = ("damage", "flip", "flip", "remove", "obstacle", "full", "room")
MESSAGE_KINDS = ("flip", "flip", "flip", "delay", "truncate", "truncate", "double", "drop")


@dataclass
class Side:
    """The place of a group: the first daemons of some."""

    daemons: WrongDaemons
    shape: tuple[int, int]
    files: list[TierFile] = field(default_factory=list)
    """Those of the tiers, if these outlive their daemons."""
    num_blocks: int = 0
    """Of the KV cache; 0: as many as one request needs, which is to be found out."""

    @property
    def size(self) -> int:
        return self.shape[0] * self.shape[1]

    @property
    def endpoints(self) -> list[str]:
        return self.daemons.endpoints[: self.size]

    @property
    def pids(self) -> list[int]:
        return list(self.daemons.pids[: self.size])

    @property
    def wrongs(self):
        return self.daemons.wrongs[: self.size]

    def find_files(self, num_slots: int) -> None:
        """Note the files of the tiers, which have so many slots."""
        self.files = [TierFile(own, num_slots) for own in self.daemons.tiers[: self.size]]


class World:
    """A group of a setting with a connector, and its driver."""

    def __init__(self, setting: Setting, model: Model, sides: Sequence[Side]) -> None:
        """sides: that of the group last, after that which computes prompts, if there is one."""
        self.setting, self.model, self.sides = setting, model, sides
        self.counts: Counter[str] = Counter()
        self.may_die = False
        self.deaths: list[str] = []
        """Daemons that have died by themselves, and the ends of their logs."""
        self.weights = "a"
        """Those that requests get from now on."""
        self.weights_of: dict[int, str] = {}
        """By number of their version, as outputs have it."""
        self.adapter = None
        self.adapter_content = 1
        self.contents_of: dict[int, int] = {}
        """Contents that updates have given to the adapter, by number of its weights."""
        self._stack = contextlib.ExitStack()
        """Of the driver."""
        self._contents: dict[bytes, str] = {}
        """Weights by the digest of their files."""

    @property
    def side(self) -> Side:
        return self.sides[-1]

    def open(self) -> None:
        """Load the model, and open the driver."""
        if self.setting.has_adapter:
            self.model.put_adapter(1)
        self._open_driver(reload=True)

    def close(self) -> None:
        """Close the driver."""
        self._stack.close()

    def prepare(self, case) -> None:
        """Begin a case."""

    def strike(self, case) -> str:
        """Let something go wrong, and name it."""
        raise NotImplementedError

    def between_waves(self, case) -> None:
        """Let the second wave load what the first one has left."""
        self.evict(case)

    def evict(self, case) -> None:
        """Evict blocks from the KV cache, by a long prompt, of which the group takes steps: of two
        tokens the first one may come from elsewhere."""
        prompt = prompts(case.rng.randrange(1 << 30), [60])[0].tolist()
        self.driver.add_request(greedy_request(f"{case.seed}-evict", prompt, 2))
        assert not [output.error for output in self.driver.run() if output.error]

    def strike_dead(self, case) -> None:
        """Damage what dead daemons have left."""

    def settle(self) -> None:
        """Undo what goes wrong, and wait until nothing is on its way."""

    def check(self) -> None:
        """Assert that nothing is left behind elsewhere."""

    def kill(self, case) -> None:
        """Kill a daemon, or all of a side."""
        side = case.rng.choice(self.sides)
        pids = side.pids
        for pid in pids if not case.rng.randrange(3) else [case.rng.choice(pids)]:
            with contextlib.suppress(ProcessLookupError):  # it has died among messages
                kill_and_wait(pid)
        self.strike_dead(case)

    def take_over(self) -> None:
        """Have another driver take the group, while this one is at work, and then end this one. The
        caller lets it adopt requests."""
        old = self._stack
        self._stack = contextlib.ExitStack()
        if self.may_die:
            self.side.daemons.restart_dead()
        try:
            self._open_driver(reload=False)
        finally:
            old.close()

    def update(self, rng: random.Random, running: str) -> None:
        """Change the weights in place; old blocks match no more."""
        self.weights = "b" if self.weights == "a" else "a"
        self._change_weights(self.group, rng.choice(("reload", "disk")), running)
        self._note_weights()

    def replace_adapter(self) -> None:
        """Give the adapter's files another content, and have them read again."""
        self.adapter_content = 3 - self.adapter_content
        self.model.put_adapter(self.adapter_content)
        self.adapter = self.group.loras.add(self.model.adapter_name, load_inplace=True)
        self.contents_of.clear()

    def update_adapter(self, running: str) -> None:
        """Change the adapter's weights in place."""
        weights, content = self.group.weights, 3 - self.adapter_content
        weights.init_transfer_engine(DiskEngine())
        weights.start_update(target=self.adapter, running=running)
        weights.update(TensorList(), DiskSource(model=self.model.adapters[content]))
        weights.finish_update()
        self.adapter = self.group.loras.known[self.adapter.lora_id]
        self.adapter_content = content
        self.contents_of[self.adapter.weights_version] = content

    @property
    def group(self) -> WorkerGroup:
        return self.driver.group

    def _change_weights(self, group, way, running):
        path = str(self.model.path(self.weights))
        if way == "reload":
            group.weights.reload(path, running=running)
            return
        group.weights.init_transfer_engine(DiskEngine())
        group.weights.start_update(running=running)
        group.weights.update(TensorList(), DiskSource(model=path))
        group.weights.finish_update()

    def _open_driver(self, *, reload: bool) -> None:
        """Open the driver of the group that decodes."""
        self._enter_driver(reload=reload)

    def _enter_driver(self, *, reload: bool, **options: object) -> None:
        self.driver = self._stack.enter_context(self._driving(self.side, reload=reload, **options))
        if reload:
            self._note_weights()
        else:
            self._find_weights()
        if self.setting.has_adapter:
            self._find_adapter()

    @contextlib.contextmanager
    def _driving(
        self, side: Side, *, reload: bool, adopts: bool = True, **options: object
    ) -> Iterator[object]:
        """A driver of the model, with a small KV cache. reload: begin anew, else keep the requests
        of the driver before if this one adopts them."""
        config = self.setting.config(self.model, side.shape)
        with WorkerGroup(side.endpoints, config.parallel, lease=LONG_LEASE) as group:
            found = group.attach(
                force=True, keep_requests=adopts and not reload, wait_s=ATTACH_WAIT_S
            )
            if not reload:  # a reload has changed the model's directory
                config = next((each.config for each in found if each.config), config)
            blocks = side.num_blocks or MANY_BLOCKS
            loaded = group.prepare(config, reload=reload, num_gpu_blocks=blocks)
            if not side.num_blocks:
                side.num_blocks = few_blocks(config, loaded.groups)
                group.reset("MODEL_LOADED")
                loaded = group.prepare(config, num_gpu_blocks=side.num_blocks)
            if loaded.num_host_blocks and side.daemons.tiers:
                side.find_files(loaded.num_host_blocks)
            yield new_driver(group, loaded, recover=self._recovering(side, group), **options)

    def _recovering(self, side: Side, group: WorkerGroup) -> Callable[[object], None]:
        """What a driver calls after a death."""

        def recover(died):
            if not self.may_die:
                self.deaths.append(f"{died}\n{side.daemons.log_tail(died.rank)}")
            with side.daemons.kept_alive():  # successors are killed, too
                group.replace(died.rank)
            known, found = group.weights.version, common_version(group.get_status())
            if known is None or found is None or known.identity != found.identity:
                # No rank is left that knew which files were read last.
                group.weights.reload(str(self.model.path(self.weights)))
                if group is self.group:
                    self._note_weights()

        return recover

    def _note_weights(self) -> None:
        """Note what is known of the version that the group has."""
        version = self.group.weights.version
        assert version is not None, "ranks have the same weights"
        self._contents[version.identity.content] = self.weights
        self.weights_of[version.number] = self.weights

    def _find_weights(self) -> None:
        """Find out which weights the group has: some that were noted."""
        version = self.group.weights.version
        assert version is not None, "ranks have the same weights"
        self.weights = self._contents[version.identity.content]
        self.weights_of[version.number] = self.weights

    def _find_adapter(self) -> None:
        """Find the adapter that an earlier driver has left, or add it."""
        known = [
            each for each in self.group.loras.known.values() if each.name == self.model.adapter_name
        ]
        if known:
            (self.adapter,) = known
            return
        self.contents_of.clear()
        self.model.put_adapter(self.adapter_content)
        self.adapter = self.group.loras.add(self.model.adapter_name, load_inplace=True)

    def read_files(self) -> None:
        """Have weights and adapter read from files, if updates have changed them: the daemons that
        replace others can read them then."""
        version = self.group.weights.version
        if version is None or not version.identity.stamps:
            self.group.weights.reload(str(self.model.path(self.weights)))
            self._note_weights()
        if self.adapter is not None and self.adapter.weights_version:
            self.replace_adapter()


class TierWorld(World):
    """A group with a host tier, which may outlive its daemons."""

    def strike(self, case):
        if not self.side.files:
            return "nothing"  # wrong_transfers.py does it
        kind = case.rng.choice(ALIVE)
        self._damage(case, kind)
        return f"tier {kind}"

    def prepare(self, case):
        put_wrongs(case, self.side, SLOT_KINDS)

    def strike_dead(self, case):
        # Only of daemons that have ended: a file that is mapped must not be shortened.
        for pid, file in zip(self.side.pids, self.side.files, strict=False):
            if not _is_alive(pid) and case.rng.randrange(2):
                file.damage(case.rng, case.rng.choice(DEAD), slots_of(self.driver))

    def settle(self):
        self.counts.update(take_wrongs(self.side))

    def _damage(self, case, kind):
        case.rng.choice(self.side.files).damage(case.rng, kind, slots_of(self.driver))


class FilesWorld(World):
    """A group whose blocks are kept in files."""

    def strike(self, case):
        kind, rng = case.rng.choice(FILE_KINDS), case.rng
        if kind in ("full", "room"):
            self._limit_files(FULL_BYTES if kind == "full" else resource.RLIM_INFINITY)
            return f"file {kind}"
        files = []
        with contextlib.suppress(OSError):  # a rank has just removed a directory
            files = self._files()
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
        return f"file {kind}"

    def strike_dead(self, case):
        for _ in range(case.rng.randrange(6)):
            self.strike(case)

    def between_waves(self, case):
        self.driver.scheduler.forget_prefixes()

    def settle(self):
        self._limit_files(resource.RLIM_INFINITY)
        for own in self._directories():
            for path in own.glob("*/??"):
                if path.is_file():
                    path.unlink()

    def _directories(self):
        return self.side.daemons.files[: self.side.size]

    def _files(self):
        found = (each for own in self._directories() for each in sorted(own.glob("*/*/*")))
        return [each for each in found if each.suffix != ".tmp"]

    def _limit_files(self, num_bytes):
        for pid in self.side.pids:
            with contextlib.suppress(ProcessLookupError):
                resource.prlimit(pid, resource.RLIMIT_FSIZE, (num_bytes, resource.RLIM_INFINITY))


class PeersWorld(World):
    """A group that decodes, and one that computes its prompts."""

    def prepare(self, case):
        kinds = [kind for kind in MESSAGE_KINDS if case.rng.randrange(3)]
        put_wrongs(case, self.sides[0], kinds)
        put_wrongs(case, self.sides[1], SLOT_KINDS)
        if case.kills and case.rng.randrange(2):
            side = case.rng.choice(self.sides)
            wrongs = Wrongs(case.rng.randrange(1 << 30), ("kill",), case.rng.choice([1, 3, 6]))
            case.rng.choice(side.wrongs).put(wrongs)

    def between_waves(self, case):
        super().between_waves(case)
        if case.rng.randrange(2):  # have all blocks sent again
            self.driver.scheduler.forget_prefixes()
            self.driver.scheduler.forget_host_tier()

    def strike(self, case):
        place = case.rng.randrange(2)
        if not case.kills and not case.rng.randrange(30):
            stall(case.rng.choice(self.sides[place].pids))
            return "stall"
        files = self.sides[place].files
        if not files:
            return "nothing"
        kind = case.rng.choice(ALIVE)
        driver = self.driver if place else self._prefill_driver
        case.rng.choice(files).damage(case.rng, kind, slots_of(driver))
        return f"tier {kind}"

    def strike_dead(self, case):
        for side, driver in zip(self.sides, (self._prefill_driver, self.driver), strict=True):
            for pid, file in zip(side.pids, side.files, strict=False):
                if not _is_alive(pid) and case.rng.randrange(2):
                    file.damage(case.rng, case.rng.choice(DEAD), slots_of(driver))

    def settle(self):
        for side in self.sides:
            self.counts.update(take_wrongs(side))

    def check(self):
        eventually(self._num_coming, "slots that come")
        eventually(lambda: self._prefill_driver.scheduler.exchange.num_slots, "slots that go")
        for endpoint in self.sides[0].endpoints:
            eventually(lambda endpoint=endpoint: self._num_held(endpoint), "blocks of prompts")

    def take_over(self):
        """Also of the group that computes prompts: its driver lives in the same process."""
        self._prefill._is_stopping = True  # it does not take the group back
        super().take_over()

    def update(self, rng, running):
        """Of both groups, one after the other."""
        way = rng.choice(("reload", "disk"))
        later = rng.choice(("before", "after"))
        if later == "before":
            self._update_prefill(way, {"a": "b", "b": "a"}[self.weights])
        super().update(rng, running)
        if later == "after":
            self._update_prefill(way, self.weights)

    def _update_prefill(self, way, weights):
        """Have its thread do it, at some time."""

        def change(serving):
            group = serving._driver.group
            if self._prefill_weights != weights:
                path = str(self.model.path(weights))
                group.weights.reload(path)
                self._prefill_weights = weights

        self._prefill._commands.put(change)

    def _open_driver(self, *, reload):
        sources = self.sides[0]
        begins = [reload]
        self._prefill_driver = None

        @contextlib.contextmanager
        def open_driver():
            with contextlib.ExitStack() as opened:
                with sources.daemons.kept_alive():
                    driver = opened.enter_context(
                        self._driving(sources, reload=begins[0], adopts=False)
                    )
                    begins[0] = False
                    self._bring(driver.group)
                self._prefill_driver = driver
                yield driver

        thread = PrefillThread(open_driver, timeout_s=MOVE_TIMEOUT_S, reopen_s=REOPEN_S)
        prefill = self._stack.enter_context(thread)
        prefill.wait_opened()
        self._prefill = prefill
        options = DriverOptions(prefill=prefill)
        self._enter_driver(reload=reload, options=options)

    def _bring(self, group):
        """Give the group that computes prompts the weights of the other one."""
        version = group.weights.version
        found = None if version is None else self._contents.get(version.identity.content)
        if found is None and version is not None and self.weights == "a":
            found = "a"  # at first
        if found != self.weights:
            group.weights.reload(str(self.model.path(self.weights)))
        self._prefill_weights = self.weights

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


WORLDS = {"tier": TierWorld, "kept tier": TierWorld, "files": FilesWorld, "peers": PeersWorld}
"""By connector."""


def put_wrongs(case, side: Side, kinds: Sequence[str]) -> None:
    """Let some of these go wrong in each daemon."""
    for wrongs in side.wrongs:
        seed, one_of = case.rng.randrange(1 << 30), case.rng.choice([1, 2, 4, 8])
        wrongs.put(Wrongs(seed, list(kinds), one_of, case.rng.choice([1, 1, 2, 4])))


def take_wrongs(side: Side) -> list[str]:
    """What has gone wrong; from now on, nothing does."""
    noted = []
    for wrongs in side.wrongs:
        wrongs.put(Wrongs())
        noted += [kind if kind in SLOT_KINDS else f"message {kind}" for kind in wrongs.take_noted()]
    return noted


def stall(pid: int) -> None:
    """Stop a process for some time."""

    def go_on():
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGCONT)

    os.kill(pid, signal.SIGSTOP)
    threading.Timer(STALL_S, go_on).start()


def flip(rng: random.Random, path: Path) -> None:
    """Change some bits of a block in a file, unless it was cut before."""
    raw = bytearray(path.read_bytes())
    if len(raw) <= HEADER_BYTES:
        return
    for _ in range(rng.choice([1, 2, 64, 512])):
        raw[rng.randrange(HEADER_BYTES, len(raw))] ^= 1 << rng.randrange(8)
    path.write_bytes(raw)


def eventually(count: Callable[[], int], what: str) -> None:
    """Wait until a count is 0. Raises AssertionError after SETTLE_S."""
    until = time.monotonic() + SETTLE_S
    while count():
        assert time.monotonic() < until, f"{what} are held"
        time.sleep(0.002)


def slots_of(driver) -> list[int]:
    """The slots of a driver's tier that were used last."""
    if driver is None:
        return []
    return [*driver.scheduler.exchange._tier.slots._slot_of.values()][-60:]


def num_held(group: WorkerGroup) -> int:
    """Blocks of requests, of all ranks: those that do not answer steps may lag behind."""
    return sum(status.num_kv_blocks_held for status in group.get_status())


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

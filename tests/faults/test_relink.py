"""Ranks that die: the driver identifies them, the survivors are released and keep their state,
another daemon takes the place, and every request ends with the tokens of an undisturbed run."""

import json
import random
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from operator import le

import psutil
import pytest

from rpc_schema.codec import decode_step
from rpc_schema.lifecycle import Relink
from tests.support.command_line import ask_status, start_client
from tests.support.driving import Cases, random_cases
from tests.support.embedded_prompts import clear_cases
from tests.support.every_draft import every_draft
from tests.support.exhaustive import exhaustively
from tests.support.serving import (
    connect,
    drafts_by,
    generate,
    scheduler_limits,
    worker_config,
)
from tests.support.supervised import Supervised
from tests.support.waiting import PATIENCE_S, wait_until
from worker_client.driver import Driver
from worker_client.errors import ReplacementFailed, WorkerDied
from worker_client.group.replacement import ReplacementReport
from worker_client.worker_group import WorkerGroup

STEP_DEADLINE_MS = 2000
STEPS_BEFORE = 8


@dataclass
class Loss:
    """What happens to a rank under load, and what came of it."""

    daemons: Supervised
    rank: int
    then: object = None
    """Called with (group, died) instead of a plain restart and replace()."""
    steps_before: int = STEPS_BEFORE
    killed_at: float = 0.0
    noticed_at: float = 0.0
    died: WorkerDied | None = None
    replaced: list[ReplacementReport] = field(default_factory=list)

    def generate(self, group: WorkerGroup, loaded, cases: Cases) -> dict[str, list[int]]:
        """Serve the cases, and kill the rank after steps_before steps."""
        driver = Driver(
            group,
            every_draft(scheduler_limits(group, loaded)),
            lambda _: self._kill(driver),
            recover=lambda died: self._recover(group, died),
        )
        for request in cases.requests:
            driver.add_request(request)
        return {output.req_id: output.token_ids for output in driver.run()}

    def _kill(self, driver: Driver) -> None:
        if len(driver.records) >= self.steps_before and not self.killed_at:
            self.killed_at = self.daemons.kill(self.rank)

    def _recover(self, group: WorkerGroup, died: WorkerDied) -> None:
        self.noticed_at, self.died = time.monotonic(), died
        if self.then is None:
            self.daemons.restart(self.rank)
            self.replaced.append(group.replace(died.rank))
        else:
            self.replaced.append(self.then(group, died))


@pytest.fixture(scope="module")
def cases(checkpoint):
    return random_cases(checkpoint(), seed=50, count=6, max_tokens=32)


@pytest.fixture
def pair(two_supervised):
    """Two daemons that live."""
    two_supervised.revive()
    return two_supervised


@pytest.fixture
def config(checkpoint):
    def of(pp: int, tp: int = 1, **fields):
        return worker_config(checkpoint().path, pp, tp, step_deadline_ms=STEP_DEADLINE_MS, **fields)

    return of


def loads(status, epoch: int) -> list[str]:
    """Return the loads since that epoch attached: older ones may have left the history."""
    ends = [line.endswith(f"(epoch {epoch} attached)") for line in status.transitions]
    return [line for line in status.transitions[ends.index(True) :] if "(LoadModel)" in line]


@pytest.mark.parametrize(
    ("pp", "tp", "rank"),
    [
        pytest.param(2, 1, 0, marks=pytest.mark.exhaustive),
        (1, 2, 1),
        pytest.param(2, 1, 1, marks=pytest.mark.exhaustive),
        pytest.param(1, 2, 0, marks=pytest.mark.exhaustive),
    ],
)
def test_killed_rank_is_replaced_under_load(pair, config, cases, detection, pp, tp, rank):
    with connect(pair.endpoints, config(pp, tp)) as (group, loaded):
        before = group.get_status()[1 - rank]
        loss = Loss(pair, rank)
        tokens = loss.generate(group, loaded, cases)
        after = group.get_status()
        again = generate(group, loaded, cases.requests)
    assert tokens == again.tokens == cases.expected
    assert loss.died.rank == rank and pair.endpoints[rank] in str(loss.died)
    fault = f"kill -9 of rank {rank} in a step, pp={pp} tp={tp}"
    detection(3, fault, 0.1, loss.noticed_at - loss.killed_at, loss.died.detail)
    (replaced,) = loss.replaced
    assert replaced.ranks == replaced.loaded_ranks == (rank,)
    survivor = after[1 - rank]
    assert after[rank].pid == pair.processes[rank].pid
    assert (survivor.worker_uid, survivor.load) == (before.worker_uid, "READY")
    assert survivor.memory_bytes["weights"] == before.memory_bytes["weights"]
    assert loads(survivor, before.epoch) == loads(before, before.epoch)
    assert survivor.epoch == after[rank].epoch > before.epoch
    assert survivor.link == after[rank].link > before.link


@pytest.mark.parametrize(
    ("method", "pp", "tp"),
    [
        ("suffix", 2, 1),
        ("draft_model", 1, 2),
        *(
            exhaustively(method, *shape)
            for method in ("ngram", "suffix", "draft_model")
            for shape in ((1, 1), (2, 1), (1, 2), (3, 1), (2, 2))
            if (method, *shape) not in (("suffix", 2, 1), ("draft_model", 1, 2))
        ),
    ],
)
def test_rank_that_drafts_or_verifies_is_replaced_at_any_point(
    pair, supervised, config, cases, checkpoint, method, pp, tp
):
    """Requests have the same tokens, and drafts again."""
    seed = random.randrange(1 << 30)
    rng, size = random.Random(seed), pp * tp
    daemons = pair if size <= 2 else supervised(size)
    speculative = drafts_by(method, checkpoint().path)
    with connect(daemons.endpoints[:size], config(pp, tp, speculative=speculative)) as served:
        loss = Loss(daemons, rng.randrange(size), steps_before=rng.randint(1, 8))
        tokens = loss.generate(*served, cases)
        again = generate(*served, cases.requests)
    assert tokens == again.tokens == cases.expected, (seed, loss.rank, loss.steps_before)
    assert loss.replaced[0].ranks == (loss.rank,), seed
    assert again.driver.drafts.num_drafted > 0, seed


def test_embeddings_are_sent_again_to_a_replaced_rank(pair, config, checkpoint):
    embedded = clear_cases(checkpoint(), seed=51, count=5, max_tokens=32)
    with connect(pair.endpoints, config(2)) as (group, loaded):
        loss = Loss(pair, 0)
        assert loss.generate(group, loaded, embedded) == embedded.expected
        assert loss.replaced
        assert [status.upload_bytes for status in group.get_status()] == [0, 0]


@pytest.mark.exhaustive
def test_survivor_of_killed_ranks_keeps_no_communicator(pair, config, cases):
    """A failed step leaks neither threads nor descriptors."""
    with connect(pair.endpoints, config(2)) as (group, loaded):
        survivor = psutil.Process(group.get_status()[0].pid)
        most: list[int] = []
        for _ in range(3):
            assert Loss(pair, 1).generate(group, loaded, cases) == cases.expected
            count = settled(lambda: [survivor.num_threads(), survivor.num_fds()], most)
            most = most or count
            assert all(map(le, count, most)), (count, most)


def settled(read: Callable[[], list[int]], most: list[int], looks: int = 10) -> list[int]:
    """Return the counts once they are within `most`; without those, once they are stable. An old
    link is closed in the background."""
    seen, until = [read()], time.monotonic() + 20.0
    while time.monotonic() < until:
        if all(map(le, seen[-1], most)) if most else seen[-looks:] == seen[-1:] * looks:
            break
        time.sleep(0.05)
        seen.append(read())
    return seen[-1]


def test_killed_idle_rank_is_known_by_a_look(pair, config, cases, detection):
    with connect(pair.endpoints, config(2)) as (group, loaded):
        assert generate(group, loaded, cases.requests[:1]).tokens
        killed_at = pair.kill(1)
        with pytest.raises(WorkerDied) as died:
            while True:
                group.look()
                time.sleep(0.005)
        detection(
            2, "kill -9 of an idle rank", 0.1, time.monotonic() - killed_at, died.value.detail
        )
        assert group.watch.liveness[1] == "dead" != group.watch.liveness[0]
        events = [event for event in group.watch.events if event.at >= killed_at]
        kinds = [event.kind for event in events if event.rank == 1]
        # A process that ends may close its connection before its listening socket.
        assert kinds in (["dead"], ["suspect", "dead"])
        survivor = group.clients[0]
        freed_at = time.monotonic()
        wait_until(lambda: survivor.get_status().link_state == "broken", "it has left the link")
        detection(2, "the survivor has left the link", 2.0, time.monotonic() - freed_at, "control")
        assert survivor.get_status().load == "READY"
        wait_until(lambda: survivor.get_status().phase == "IDLE", "it is idle")
        with pytest.raises(ReplacementFailed, match="rank 1 is not replaced") as failed:
            group.replace(1, within_s=0.3)
        assert failed.value.rank == 1
        for use in (group.look, group.attach, lambda: generate(group, loaded, cases.requests)):
            with pytest.raises(WorkerDied, match="rank 1"):
                use()
        pair.restart_later(1)
        group.replace(1)
        assert generate(group, loaded, cases.requests).tokens == cases.expected


@pytest.mark.exhaustive
def test_second_death_during_the_replacement(pair, config, cases):
    """Both ranks are lost in the end, the survivor of the first death while it waits at the
    rendezvous or before."""

    def recover(group: WorkerGroup, died: WorkerDied) -> ReplacementReport:
        pair.restart(1)
        pair.kill(0)
        pair.restart_later(0)
        return group.replace(died.rank)

    with connect(pair.endpoints, config(2)) as (group, loaded):
        loss = Loss(pair, 1, recover)
        assert loss.generate(group, loaded, cases) == cases.expected
        assert loss.replaced[0].loaded_ranks == (0, 1) or loss.replaced[0].loaded_ranks == (1, 0)
        assert [status.pid for status in group.get_status()] == [p.pid for p in pair.processes]


def test_new_rank_killed_while_it_is_linked(pair, config, cases):
    """The survivor waits for it at the rendezvous, and must not wait long."""
    killed = []

    def recover(group: WorkerGroup, died: WorkerDied) -> ReplacementReport:
        client = group.clients[0]
        send = client.send

        def relink_and_kill(frames) -> None:
            send(frames)
            if isinstance(decode_step(frames), Relink) and not killed:
                killed.append(pair.kill(1))
                pair.restart_later(1)

        client.send = relink_and_kill
        pair.restart(1)
        return group.replace(died.rank)

    with connect(pair.endpoints, config(2)) as (group, loaded):
        loss = Loss(pair, 1, recover)
        assert loss.generate(group, loaded, cases) == cases.expected
    assert killed
    assert loss.replaced[0].ranks == (1,)


@pytest.mark.exhaustive
def test_spare_takes_the_place(pair, config, cases, supervised):
    spare = supervised(1)
    with connect(pair.endpoints, config(2)) as (group, loaded):
        loss = Loss(pair, 1, lambda group, died: group.replace(1, spare.endpoints[0]))
        assert loss.generate(group, loaded, cases) == cases.expected
        assert group.get_status()[1].pid == spare.processes[0].pid
        assert generate(group, loaded, cases.requests).tokens == cases.expected


def test_generate_outlives_a_daemon(pair, checkpoint, detection):
    """The command waits for the daemon's supervisor."""
    cases = random_cases(checkpoint(), seed=51, count=6, max_tokens=96)
    source, target = pair.directory / "in.jsonl", pair.directory / "out.jsonl"
    lines = [
        {
            "id": request.id,
            "prompt_token_ids": request.prompt.tolist(),
            "max_tokens": request.max_tokens,
        }
        for request in cases.requests
    ]
    source.write_text("".join(json.dumps(line) + "\n" for line in lines))
    sizes = ("--pipeline-parallel-size", "2", "--max-num-seqs", "1", "--num-gpu-blocks", "128")
    words = ("generate", "--endpoints", ",".join(pair.endpoints), "--model", checkpoint().path)
    files = ("--input", source, "--output", target, "--reload")
    with start_client(pair.directory, *words, *sizes, *files) as command:
        wait_until(lambda: steps_of(pair.endpoints[1], command.pid) > 40, "it generates", 60.0)
        pair.kill(1)
        killed_at = time.monotonic()
        pair.restart(1)
        assert command.wait(PATIENCE_S) == 0, command.stderr.read()
    detection(
        2, "generate goes on and ends, a daemon restarted", 30.0, time.monotonic() - killed_at
    )
    results = map(json.loads, target.read_text().splitlines())
    assert {line["id"]: line["token_ids"] for line in results} == cases.expected
    assert steps_of(pair.endpoints[1]) > 0


def steps_of(endpoint: str, driver_pid: int | None = None) -> int:
    """How many steps a READY daemon has run for its driver, or for this one."""
    status = ask_status(endpoint)
    if status is None or status.load != "READY":
        return 0
    if driver_pid is None:
        return status.last_seq
    is_its = status.lease.holder_name.endswith(f":{driver_pid}")
    # A driver holds the lease before the step thread has turned to its epoch.
    return status.last_seq if is_its and status.epoch == status.lease.epoch else 0

"""`worker-client serve --prefill-endpoints` as its users run it: texts are the same tokens as those
of a server without, also while a daemon that computes prompts is killed, and none is lost."""

import asyncio
import random
import re
import shutil
import signal
import time

import pytest

from tests.e2e.test_service import PATH, completion, running, streamed, whole
from tests.support.command_line import run_client, short_directory
from tests.support.forked_daemons import ForkedDaemons
from tests.support.service_app import service_app
from tests.support.serving import kill_and_wait, worker_config
from tests.support.waiting import PATIENCE_S
from worker_client.cli.demo_model import SENTENCES, make_demo_model
from worker_host.exposition import FRESH_S

SEED = random.randrange(10**6)
NUM_REQUESTS = 24
LINKED = "prefill_linked"
MOVED = 'prefill_prompts_total{end="moved"}'


@pytest.fixture(scope="module")
def directory():
    path = short_directory()
    yield path
    shutil.rmtree(path)


@pytest.fixture(scope="module")
def model(model_root):
    path = model_root / "apart"
    make_demo_model(path)
    return path


@pytest.fixture
def daemons(model_root):
    """The first two compute prompts, as stages; the third decodes. The test kills one."""
    with ForkedDaemons(["cpu"] * 3, model_root) as daemons:
        yield daemons


def cases():
    """Prompts of several blocks, of which no two begin alike."""
    rng, words = random.Random(SEED), SENTENCES.split()
    for number in range(NUM_REQUESTS):
        own = rng.sample(words, rng.randint(20, 40))
        yield completion(f"{number} {' '.join(own)}", max_tokens=rng.randint(2, 12))


async def metrics(client):
    """The values of the server's metrics of the other group, by their labels."""
    text = (await client.get("/metrics")).text
    found = re.findall(r"^worker_service_(prefill_\w+(?:\{.*?\})?) (\S+)$", text, re.M)
    return {name: float(value) for name, value in found}


def test_a_prefill_daemon_killed_under_load_loses_no_request(daemons, model, directory):
    asked, sources, own = [*cases()], daemons.endpoints[:2], daemons.endpoints[2]
    shared = ("--model", str(model), "--endpoints", own, "--reload", "--max-num-seqs", "16")
    tier = ("--kv-host-memory-bytes", str(8 << 20), "--max-num-batched-tokens", "256")
    other = ("--prefill-endpoints", ",".join(sources), "--prefill-pipeline-parallel-size", "2")

    async def all_of(client, kill=None):
        async def one(number, case):
            await asyncio.sleep(number * 0.02)
            if kill is not None and number == NUM_REQUESTS // 3:
                await asyncio.to_thread(kill)
            return (await streamed(client, case))[0] if number % 2 else await whole(client, case)

        return await asyncio.gather(*(one(*each) for each in enumerate(asked)))

    config = worker_config(model, max_num_batched_tokens=256, max_num_seqs=16)
    with service_app(model, config, [own]) as app:
        bodies = [app.ok(PATH, case)["choices"] for case in asked]
    expected = [[(each["text"], each["finish_reason"]) for each in body] for body in bodies]

    def kill():
        kill_and_wait(daemons.pids[1])
        daemons.restart_dead()

    with running(directory, *shared, *tier, *other) as service:

        async def moves(client):
            """Send prompts until blocks have come; return the metrics then."""
            await asyncio.sleep(FRESH_S)  # a scrape may be as old
            before, deadline = await metrics(client), time.monotonic() + PATIENCE_S
            while (now := await metrics(client))[MOVED] == before[MOVED] or not now[LINKED]:
                assert time.monotonic() < deadline, (SEED, now)
                prompt = f"{time.monotonic_ns()} {SENTENCES[:200]}"
                await whole(client, completion(prompt, max_tokens=2))
            return now

        async def disturbed():
            async with service.client() as client:
                before = await moves(client)
                found = await all_of(client, kill)
                return found, before, await moves(client)

        found, first, last = asyncio.run(disturbed())
        shown = " ".join(run_client(directory, "top", "--once", "--endpoints", own).stdout.split())
        assert re.search(r"host tier: .* 0 sent to another group, [1-9]\d* received", shown), shown
        service.process.send_signal(signal.SIGTERM)
        assert service.process.wait(60) == 0
    assert found == expected, f"seed {SEED}"
    lost = last["prefill_lost_links_total"] - first["prefill_lost_links_total"]
    assert lost > 0 < last["prefill_blocks_total"] and last[LINKED] == 1, last
    assert last["prefill_held_seconds_count"] >= last[MOVED]

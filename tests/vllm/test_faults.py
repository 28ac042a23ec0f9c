"""`vllm serve` on a pipeline of two daemons while one side is killed, stopped, drained or
taken. Each request ends with the same tokens as in an undisturbed run."""

import concurrent.futures
import random
import re
import shutil
import signal
import threading
import time

import psutil
import pytest
import torch
from safetensors.torch import load_file, save_file

from tests.support.command_line import ask_status, run_client, short_directory, status_of
from tests.support.supervised import Supervised
from tests.support.waiting import wait_until
from tests.vllm.serving import DAEMON_PYTHON, start_server
from worker_client.cli.demo_model import VOCAB_SIZE, make_demo_model

pytestmark = [pytest.mark.timeout(900), pytest.mark.slow]

NUM_REQUESTS = 32
LEAST_SEEN = 200
"""Tokens that clients have received when the fault is injected."""

SENTENCE_START = "The driver decides"
POISONED = VOCAB_SIZE - 1
"""A token whose embedding is no number."""

LIMIT_S = 120.0
SETTINGS = {"reload": True, "replace_within_s": 90.0}


@pytest.fixture(scope="module")
def root(tmp_path_factory):
    root = tmp_path_factory.mktemp("models")
    make_demo_model(root / "demo")
    weights = load_file(root / "demo" / "model.safetensors")
    weights["model.embed_tokens.weight"][POISONED] = torch.nan
    save_file(weights, root / "demo" / "model.safetensors", metadata={"format": "pt"})
    return root


@pytest.fixture(scope="module")
def directory():
    path = short_directory()
    yield path
    shutil.rmtree(path)


@pytest.fixture(scope="module")
def daemons(root, directory):
    daemons = Supervised(2, root, directory, python=DAEMON_PYTHON)
    yield daemons
    daemons.close()


class Front:
    """The server of these daemons. One that has ended is started again when it is needed."""

    def __init__(self, daemons, root):
        self.daemons = daemons
        self._root = root
        self._server = None

    def start(self, **settings):
        """Start a server, in place of the last, with other settings."""
        self.close()
        words = ("--pipeline-parallel-size", "2", "--shutdown-timeout", "20")
        words += ("--middleware", "worker_client.vllm.health.DaemonsHealth")
        own = {**SETTINGS, **settings}
        self._server = start_server(
            self.daemons.endpoints,
            self._root / "demo",
            self._root,
            *words,
            settings=own,
            variables={"VLLM_LOGGING_LEVEL": "INFO"},
        )
        self._server.wait_until_ready()
        return self._server

    def running(self):
        """Return a server that runs."""
        if self._server is None or self._server.process.poll() is not None:
            return self.start()
        return self._server

    def close(self):
        """End the server."""
        if self._server is not None:
            self._server.close()


@pytest.fixture(scope="module")
def front(daemons, root):
    front = Front(daemons, root)
    yield front
    front.close()


@pytest.fixture
def server(front, daemons):
    daemons.revive()
    return front.running()


def load():
    """Return requests, greedy and seeded, some of which share their beginning."""
    source = random.Random(81)
    shared = [source.randrange(1, POISONED) for _ in range(50)]

    def prompt():
        own = [source.randrange(1, POISONED) for _ in range(source.randrange(3, 30))]
        return shared[: source.randrange(50)] + own

    return [
        {
            "prompt": prompt(),
            "max_tokens": source.randrange(20, 40),
            "ignore_eos": True,
            "temperature": source.choice((0.0, 1.2)),
            "seed": source.randrange(1 << 40),
            "logit_bias": {str(POISONED): -100},
            "return_token_ids": True,
        }
        for _ in range(NUM_REQUESTS)
    ]


class Streams:
    """Streams of requests at once, one thread each."""

    def __init__(self, server, requests=None):
        """requests: those of load() if there are none."""
        self._server = server
        self._seen = threading.Semaphore(0)
        self._pool = concurrent.futures.ThreadPoolExecutor(NUM_REQUESTS)
        self.pending = [self._pool.submit(self._read, fields) for fields in requests or load()]

    def wait_for_tokens(self, count=LEAST_SEEN):
        """Wait until clients have received this many."""
        deadline = time.monotonic() + LIMIT_S
        while count and time.monotonic() < deadline:
            if self._seen.acquire(timeout=0.1):
                count -= 1
            elif all(each.done() for each in self.pending):
                break
        assert not count, self._server.log()[-4000:]

    def results(self):
        """Return the tokens of all requests."""
        try:
            return [each.result(LIMIT_S) for each in self.pending]
        finally:
            self._pool.shutdown(wait=False, cancel_futures=True)

    def ends(self):
        """Return the errors of the requests that failed."""
        return [error for each in self.pending if (error := each.exception(LIMIT_S)) is not None]

    def _read(self, fields):
        tokens = []
        for event in self._server.stream(**fields):
            assert "error" not in event, event
            tokens += event["choices"][0]["token_ids"]
            self._seen.release()
        return tokens


@pytest.fixture(scope="module")
def expected(front, daemons):
    """The tokens of an undisturbed run."""
    daemons.revive()
    tokens = Streams(front.running()).results()
    assert [len(each) for each in tokens] == [fields["max_tokens"] for fields in load()]
    return tokens


@pytest.fixture
def streams(server, expected):
    """The same requests again, under way, with nothing cached."""
    assert server.client.post("/v1/completions", json={}).status_code == 400  # it answers
    reset_cache(server)
    streams = Streams(server)
    streams.wait_for_tokens()
    return streams


def reset_cache(server):
    """Forget the prefixes that the requests have left."""
    assert server.post("/reset_prefix_cache").json() == {"success": True}


def client(daemons, *words, **kwargs):
    """Run `worker-client WORDS` for the daemons."""
    endpoints = ",".join(daemons.endpoints)
    return run_client(daemons.directory, words[0], "--endpoints", endpoints, *words[1:], **kwargs)


# ---------------------------------------------------------------- a daemon is lost


@pytest.mark.parametrize("rank", [0, 1])
def test_killed_daemon_is_replaced_and_no_request_notices(server, daemons, streams, expected, rank):
    before = server.log().count("replaced ranks")
    daemons.kill(rank)
    daemons.restart_later(rank)
    assert streams.results() == expected
    assert server.process.poll() is None
    assert server.log().count("replaced ranks") == before + 1
    assert server.client.get("/health").status_code == 200


def test_both_daemons_are_killed(server, daemons, streams, expected):
    for rank in (0, 1):
        daemons.kill(rank)
        daemons.restart_later(rank)
    assert streams.results() == expected
    assert server.process.poll() is None


def test_stopped_daemon_is_given_up_and_replaced(server, daemons, streams, expected):
    before = server.log().count("waiting for the successor")
    daemons.stop(1)
    wait_until(
        lambda: server.log().count("waiting for the successor") > before, "it is given up", LIMIT_S
    )
    daemons.kill(1)
    daemons.restart_later(1)
    assert streams.results() == expected
    assert server.process.poll() is None


def test_daemon_that_stops_for_a_moment_is_kept(server, daemons, streams, expected):
    pids = [status_of(endpoint).pid for endpoint in daemons.endpoints]
    daemons.stop(0)
    threading.Timer(2.0, daemons.go_on, [0]).start()
    assert streams.results() == expected
    assert [status_of(endpoint).pid for endpoint in daemons.endpoints] == pids


def test_daemon_that_dies_while_nothing_runs(server, daemons, expected):
    """It is replaced for the next request."""
    daemons.kill(0)
    daemons.restart(0)
    reset_cache(server)
    assert Streams(server).results() == expected


def test_health_is_503_until_an_idle_group_can_serve_again(server, daemons, expected):
    """Nobody sends requests meanwhile: a balancer would not."""
    seen = []

    def is_healthy():
        seen.append(server.client.get("/health").status_code)
        return seen[-1] == 200

    assert is_healthy()
    daemons.kill(1)
    wait_until(lambda: not is_healthy(), "it is not healthy", LIMIT_S)
    daemons.restart(1)
    wait_until(is_healthy, "it is healthy again", LIMIT_S)
    assert {*seen} == {200, 503}
    assert {status_of(each).load for each in daemons.endpoints} == {"READY"}
    assert {status_of(each).link_state for each in daemons.endpoints} == {"up"}
    assert Streams(server).results() == expected
    assert server.process.poll() is None


# ---------------------------------------------------------------- drain


def test_drained_group_lets_requests_wait(server, daemons, streams, expected):
    before = server.log().count("the daemons are drained")
    client(daemons, "drain")
    states = {status_of(endpoint).serving for endpoint in daemons.endpoints}
    assert states == {"DRAINING"}
    wait_until(lambda: server.log().count("are drained") > before, "requests wait", LIMIT_S)
    assert any(not each.done() for each in streams.pending)
    client(daemons, "drain", "--undo")
    assert streams.results() == expected


# ---------------------------------------------------------------- no numbers


def test_request_without_numbers_fails_alone(server, expected):
    """Its prompt has a token whose embedding is no number. Others share the tokens before it."""
    source = random.Random(82)
    shared = [source.randrange(1, POISONED) for _ in range(48)]
    good = [[*shared, *(source.randrange(1, POISONED) for _ in range(5))] for _ in range(6)]
    bad = [*shared, POISONED, *(source.randrange(1, POISONED) for _ in range(40))]
    fields = {"max_tokens": 12, "ignore_eos": True, "return_token_ids": True}

    def tokens(prompt):
        return server.complete(prompt, **fields)["choices"][0]["token_ids"]

    alone = [tokens(prompt) for prompt in good]
    reset_cache(server)
    prompts = [prompt for each in good for prompt in (bad, each)]
    with concurrent.futures.ThreadPoolExecutor(len(prompts)) as pool:
        answers = list(pool.map(lambda p: server.try_to_complete(p, **fields), prompts))
    codes = [each.status_code for each in answers]
    assert codes == [500, 200] * len(good), [each.text[:200] for each in answers]
    assert "not finite" in answers[0].json()["error"]["message"]
    assert [each.json()["choices"][0]["token_ids"] for each in answers[1::2]] == alone
    assert server.try_to_complete(bad, **fields).status_code == 500
    assert [tokens(prompt) for prompt in good] == alone


# ---------------------------------------------------------------- the server ends


def num_loads(daemons):
    """Return how often daemons have loaded a model."""
    return daemons.log().count("worker.loading: loaded")


def test_killed_server_finds_the_model_loaded(server, daemons, front, streams, expected):
    loads = num_loads(daemons)
    pids = [status_of(endpoint).pid for endpoint in daemons.endpoints]
    server.kill()
    assert len(streams.ends()) > 0
    again = front.running()
    first = again.complete(**load()[0])["choices"][0]["token_ids"]
    assert first == expected[0]
    assert [status_of(endpoint).pid for endpoint in daemons.endpoints] == pids
    assert num_loads(daemons) == loads
    reset_cache(again)
    assert Streams(again).results() == expected


def test_killed_http_process_takes_its_engine_along(server, daemons, streams, front, expected):
    """A forked engine process has the server's sockets too; it ends, and gives the lease back."""
    assert server.process.poll() is None
    processes = server.processes()
    assert len(processes) == 2
    server.process.kill()
    server.process.wait()
    streams.ends()
    _, alive = psutil.wait_procs(processes, LIMIT_S)
    assert not alive
    assert {status_of(endpoint).lease.state for endpoint in daemons.endpoints} == {"free"}
    again = front.running()
    assert again.complete(**load()[0])["choices"][0]["token_ids"] == expected[0]


def num_sampled(daemons):
    """Return the number of tokens that the daemons have sampled."""
    return status_of(daemons.endpoints[-1]).num_tokens


@pytest.mark.parametrize("first", [None, signal.SIGTERM], ids=["killed", "killed as it drains"])
def test_orphaned_engine_finishes_no_requests(server, daemons, front, expected, first):
    """They would take longer than it has, for nobody, and the next server would have to wait."""
    length = 900
    fields = {"max_tokens": length, "ignore_eos": True, "return_token_ids": True}
    streams = Streams(server, [{"prompt": [5 + n], **fields} for n in range(NUM_REQUESTS)])
    streams.wait_for_tokens()
    processes = server.processes()
    if first is not None:
        before = server.log().count("draining in-flight requests")
        server.process.send_signal(first)
        wait_until(lambda: server.log().count("draining in-flight") > before, "it drains", LIMIT_S)
    sampled = num_sampled(daemons)
    server.process.kill()
    server.process.wait()
    _, alive = psutil.wait_procs(processes, LIMIT_S)
    assert not alive
    assert len(streams.ends()) == NUM_REQUESTS
    assert {status_of(endpoint).lease.state for endpoint in daemons.endpoints} == {"free"}
    assert num_sampled(daemons) - sampled < NUM_REQUESTS * length / 4
    again = front.running()
    assert again.complete(**load()[0])["choices"][0]["token_ids"] == expected[0]


def test_server_that_ends_gives_the_daemons_back(server, daemons, streams):
    """Given time (--shutdown-timeout): vLLM kills its engine at once otherwise."""
    server.terminate()
    streams.ends()
    assert {status_of(endpoint).lease.state for endpoint in daemons.endpoints} == {"free"}


def test_driver_that_takes_the_daemons_ends_the_server(server, daemons, streams, root):
    words = ("--model", str(root / "demo"), "--pipeline-parallel-size", "2", "--prompt", "The")
    taken = client(daemons, "generate", *words, "--force", "--reload", "--max-tokens", "2")
    assert taken.returncode == 0
    server.wait_for_the_end()
    streams.ends()
    assert re.search(r"FencedError.*: \S+:\d+ \(driver \w{8}\) has attached as", server.log())


def test_successor_that_never_comes_ends_the_server(daemons, front, expected):
    daemons.revive()
    server = front.start(replace_within_s=3.0)
    streams = Streams(server)
    streams.wait_for_tokens()
    daemons.kill(1)
    server.wait_for_the_end()
    assert len(streams.ends()) > 0
    assert "ReplacementFailed" in server.log()
    assert ask_status(daemons.endpoints[0], LIMIT_S) is not None
    daemons.revive()
    again = front.running()
    assert Streams(again).results() == expected

"""Drivers that are killed while serving: the next one continues their requests, and every token
equals that of an undisturbed run."""

import json
import random
import re
import shutil
import signal
import subprocess
import sys
import time

import pytest
from msgspec.structs import replace

from rpc_schema.extensions import extension_of
from rpc_schema.sampling import LogprobsWanted
from tests.support.checkpoints import prompts
from tests.support.command_line import (
    CLIENT,
    COMMAND_LIMIT_S,
    environment,
    processes_of,
    run_client,
    short_directory,
    status_of,
)
from tests.support.doomed_driver import NUM_GPU_BLOCKS, Death
from tests.support.exhaustive import exhaustively
from tests.support.forked_daemons import ForkedDaemons
from tests.support.killed_driver import DriverNursery, Plan, begin
from tests.support.serving import LONG_LEASE, drafts_by, worker_config
from worker_client.errors import ConfigMismatchError
from worker_client.worker_group import WorkerGroup
from worker_host.exit_codes import ExitCode

STEP_DEADLINE_MS = 1000
"""gloo ends a wait for a missing peer one second after this."""

MAX_TOKENS = 24
LONG = 90
"""Tokens of the command line's requests."""
KILLED_CLIENT = (sys.executable, "-m", "tests.support.killed_client")


@pytest.fixture(scope="module")
def two_daemons(model_root):
    """Daemons for this module only."""
    with ForkedDaemons(["cpu", "cpu"], model_root) as daemons:
        yield daemons


@pytest.fixture(scope="module")
def nursery():
    nursery = DriverNursery()
    yield nursery
    nursery.close()


def random_lines(rng, count=8):
    """Greedy and sampled requests, some with logprobs; half of them begin alike."""
    shared = prompts(rng.randrange(1 << 20), [21])[0].tolist()
    lengths = [rng.randint(1, 30) for _ in range(count)]
    lines = []
    for index, tail in enumerate(prompts(rng.randrange(1 << 20), lengths)):
        line = {
            "id": f"r{index}",
            "prompt_token_ids": (shared if index % 2 else []) + tail.tolist(),
            "max_tokens": rng.randint(4, MAX_TOKENS),
        }
        if not index:  # one is unfinished whenever its driver dies
            line |= {"max_tokens": MAX_TOKENS, "ignore_eos": True}
        if index % 3 == 1:
            line |= {"temperature": 1.1, "top_p": 0.9, "seed": rng.randrange(1 << 40)}
        if index % 5 == 4:
            line["logprobs"] = 2
        lines.append(json.dumps(line))
    return lines


@pytest.fixture
def make_plan(two_daemons, daemons, checkpoint):
    """make_plan(rng, pp, tp) -> a plan to serve random requests in steps that are soon full. Groups
    of more than two ranks are of the session's daemons."""

    def make(rng, pp, tp=1, step_deadline_ms=STEP_DEADLINE_MS, **fields):
        sizes = {"max_num_batched_tokens": 64, "step_deadline_ms": step_deadline_ms}
        config = worker_config(checkpoint().path, pp, tp, **sizes)
        size = pp * tp
        endpoints = two_daemons.endpoints[:size] if size <= 2 else daemons.endpoints(size)
        return Plan(endpoints, config, random_lines(rng), **fields)

    return make


def undisturbed(plan):
    """Return the tokens of its requests; load the daemons if they hold something else."""
    with WorkerGroup(plan.endpoints, plan.config.parallel, lease=LONG_LEASE) as group:
        group.attach()
        try:
            loaded = group.prepare(plan.config, num_gpu_blocks=NUM_GPU_BLOCKS)
        except ConfigMismatchError:
            loaded = group.prepare(plan.config, num_gpu_blocks=NUM_GPU_BLOCKS, reload=True)
        return tokens_of(begin(group, loaded, plan))


def tokens_of(serving):
    outputs = {output.req_id: output for output in [*serving.done, *serving.driver.run()]}
    for output in outputs.values():
        assert output.logprobs is None or len(output.logprobs) == len(output.token_ids)
    return {name: output.token_ids for name, output in outputs.items()}


def take_over(plan):
    """Adopt and finish; return what was adopted, the tokens, and what prepare() did."""
    with WorkerGroup(plan.endpoints, plan.config.parallel, lease=LONG_LEASE) as group:
        group.attach(keep_requests=True)
        loaded = group.prepare(plan.config, num_gpu_blocks=NUM_GPU_BLOCKS)
        serving = begin(group, loaded, replace(plan, adopt=True))
        return serving.adopted, tokens_of(serving), list(loaded.seconds)


@pytest.mark.parametrize(
    ("pp", "tp", "num_points", "method"),
    [
        (1, 2, 1, "none"),
        exhaustively(1, 1, 2, "none"),
        exhaustively(2, 1, 3, "none"),
        (2, 1, 1, "ngram"),
        exhaustively(1, 2, 2, "ngram"),
        exhaustively(3, 1, 2, "ngram"),
        exhaustively(1, 1, 2, "suffix"),
        exhaustively(2, 2, 2, "suffix"),
        (1, 2, 1, "draft_model"),
        exhaustively(2, 1, 2, "draft_model"),
        exhaustively(3, 1, 2, "draft_model"),
    ],
)
def test_drivers_killed_one_after_the_other_cost_no_token(
    make_plan, nursery, pp, tp, num_points, method
):
    """Each dies at a step that only some of the ranks got, with or without waiting for them."""
    seed = random.randrange(1 << 30)
    rng = random.Random(seed)
    plan = make_plan(rng, pp, tp)
    expected = undisturbed(plan)
    speculative = drafts_by(method, plan.config.model.model)
    plan = replace(plan, config=replace(plan.config, speculative=speculative))
    most = 9
    if method != "none":
        assert undisturbed(plan) == expected
        most = 3  # two drivers die before the last step, also if all drafts are accepted
    for _ in range(num_points):
        deaths = [
            Death(rng.randint(1, most), rng.sample(range(pp * tp), rng.randint(0, pp * tp)), late)
            for late in rng.sample((True, False), rng.randint(1, 2))
        ]
        nursery.live(replace(plan, death=deaths[0]))
        for death in deaths[1:]:
            nursery.live(replace(plan, death=death, adopt=True))
        adopted, tokens, phases = take_over(plan)
        assert tokens == expected, (seed, deaths)
        assert set(phases) <= {"relink"}
        if deaths[0].step > pp + 1:  # the first step's result was there when it died
            assert sum(request.num_computed_tokens for request in adopted) > 0, (seed, deaths)


@pytest.mark.parametrize("told", [[0], exhaustively([1])])
def test_adopting_driver_that_dies_in_its_first_step_costs_no_kv(make_plan, nursery, told):
    """Rows that it admitted on one rank, in its own slots, keep the KV that they came with."""
    seed = random.randrange(1 << 30)
    plan = make_plan(random.Random(seed), 2)
    expected = undisturbed(plan)
    nursery.live(replace(plan, num_results=8, detach=True))
    with WorkerGroup(plan.endpoints, plan.config.parallel, lease=LONG_LEASE) as group:
        group.attach(keep_requests=True)
        group.prepare(plan.config, num_gpu_blocks=NUM_GPU_BLOCKS)
        # Those that have all their tokens end, those with logprobs begin again.
        left = [
            request
            for request in group.adopt_requests()
            if len(request.token_ids) - request.num_prompt_tokens < len(expected[request.req_id])
            and extension_of(request.extensions, LogprobsWanted) is None
        ]
    assert left, seed
    death = Death(step=1, ranks=told, after_receipt=True)
    nursery.live(replace(plan, death=death, adopt=True))
    adopted, tokens, _ = take_over(plan)
    assert tokens == expected, seed
    kept = {request.req_id: request.num_computed_tokens for request in adopted}
    for request in left:
        assert kept[request.req_id] >= request.num_computed_tokens, (seed, request.req_id)


@pytest.mark.parametrize("scheduler", ["reference", exhaustively("random")])
def test_driver_killed_from_outside_costs_no_token(make_plan, nursery, scheduler):
    seed = random.randrange(1 << 30)
    rng = random.Random(seed)
    plan = make_plan(rng, 2, scheduler=scheduler)
    expected = undisturbed(plan)
    nursery.live(replace(plan, num_results=rng.randint(2, 12), kill_after_s=rng.random() * 0.01))
    adopted, tokens, _ = take_over(plan)
    assert tokens == expected, seed
    assert adopted, seed


def test_driver_that_leaves_in_order_leaves_everything_where_it_is(make_plan, nursery):
    rng = random.Random(random.randrange(1 << 30))
    plan = make_plan(rng, 2, step_deadline_ms=20_000)
    expected = undisturbed(plan)
    nursery.live(replace(plan, num_results=8, detach=True))
    adopted, tokens, phases = take_over(plan)
    assert tokens == expected
    assert phases == []
    complete = [r for r in adopted if len(r.token_ids) > r.num_prompt_tokens]
    assert complete
    for request in complete:
        assert request.num_computed_tokens == len(request.token_ids) - 1
        generated = request.token_ids[request.num_prompt_tokens :].tolist()
        assert (
            generated[: len(expected[request.req_id])] == expected[request.req_id][: len(generated)]
        )
    blocks = [block for request in adopted for block in request.block_ids]
    assert len(set(blocks)) < len(blocks), "none is shared"


def test_there_is_nothing_to_adopt_after_the_end_a_load_or_a_plain_attach(make_plan, nursery):
    plan = make_plan(random.Random(5), 1)
    expected = undisturbed(plan)
    assert take_over(plan)[:2] == ([], expected)
    nursery.live(replace(plan, num_results=3, detach=True))
    with WorkerGroup(plan.endpoints, plan.config.parallel, lease=LONG_LEASE) as group:
        group.attach(keep_requests=True)
        assert group.prepare(plan.config, num_gpu_blocks=NUM_GPU_BLOCKS).was_loaded
        first, again = group.adopt_requests(), group.adopt_requests()
        assert [r.token_ids.tolist() for r in first] == [r.token_ids.tolist() for r in again]
        assert [r.block_ids for r in first] == [r.block_ids for r in again]
        group.attach()
        group.prepare(plan.config, num_gpu_blocks=NUM_GPU_BLOCKS)
        assert group.adopt_requests() == []
    nursery.live(replace(plan, num_results=3, detach=True))
    with WorkerGroup(plan.endpoints, plan.config.parallel, lease=LONG_LEASE) as group:
        group.attach(keep_requests=True)
        group.prepare(plan.config, num_gpu_blocks=NUM_GPU_BLOCKS, reload=True)
        assert group.adopt_requests() == []


def test_requests_of_replaced_weights_are_not_adopted(make_plan, nursery):
    plan = make_plan(random.Random(6), 1)
    undisturbed(plan)
    nursery.live(replace(plan, num_results=3, detach=True))
    with WorkerGroup(plan.endpoints, plan.config.parallel, lease=LONG_LEASE) as group:
        group.attach(keep_requests=True)
        group.prepare(plan.config, num_gpu_blocks=NUM_GPU_BLOCKS)
        assert group.adopt_requests()
        group.weights.reload()
        assert group.adopt_requests() == []


# The command line.


@pytest.fixture
def directory():
    path = short_directory()
    yield path
    for process in processes_of(path):
        process.kill()
    shutil.rmtree(path)


@pytest.fixture(scope="module")
def options(two_daemons, checkpoint):
    sizes = {"pipeline-parallel-size": 2, "max-num-seqs": 4, "num-gpu-blocks": 128}
    words = [word for name, value in sizes.items() for word in (f"--{name}", str(value))]
    model = ("--model", str(checkpoint().path), "--dtype", "float32")
    return ("generate", *model, "--endpoints", ",".join(two_daemons.endpoints), *words)


def read_lines(path):
    return [json.loads(line) for line in path.read_text().splitlines()]


@pytest.fixture(scope="module")
def input_file(options, tmp_path_factory):
    """One short request, then long ones, of which two must wait for a slot; and the result lines of
    an undisturbed run."""
    directory, rng = tmp_path_factory.mktemp("input"), random.Random(random.randrange(1 << 20))
    lines = [{"id": "short", "prompt_token_ids": [5, 6, 7], "max_tokens": 2, "ignore_eos": True}]
    for index, prompt in enumerate(prompts(rng.randrange(99), [rng.randint(3, 30)] * 5)):
        line = {"id": f"long {index}", "prompt_token_ids": prompt.tolist(), "ignore_eos": True}
        line |= {"max_tokens": LONG, "temperature": index % 2, "seed": rng.randrange(1 << 60)}
        lines.append(line)
    source, whole = directory / "in.jsonl", directory / "whole.jsonl"
    source.write_text("".join(json.dumps(line) + "\n" for line in lines))
    run_client(directory, *options, "--reload", "--input", str(source), "--output", str(whole))
    return source, read_lines(whole)


def kill_in_the_middle(directory, options, output):
    """Run the command until it has written a result; then it is killed."""
    done = subprocess.run(
        [*KILLED_CLIENT, *options, "--output", str(output)],
        env=environment(directory),
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
        text=True,
        check=False,
        timeout=COMMAND_LIMIT_S,
    )
    assert done.returncode == -signal.SIGKILL, done.stderr


def is_settled(status):
    """Return True if it runs no step, or one that waits for a peer which never got it."""
    return status.phase == "IDLE" or status.phase_ms > 500


def held_blocks(endpoints):
    """KV blocks that each daemon holds for a dead driver, once the steps in flight have ended."""
    before, now = [], [status_of(name) for name in endpoints]
    while not all(map(is_settled, now)) or [s.last_seq for s in now] != before:
        before = [status.last_seq for status in now]
        time.sleep(0.1)
        now = [status_of(name) for name in endpoints]
    return [status.num_kv_blocks_held for status in now]


def test_killed_run_is_finished_by_the_next(directory, tmp_path, options, input_file, two_daemons):
    source, expected = input_file
    options, output = (*options, "--input", str(source)), tmp_path / "out.jsonl"
    kill_in_the_middle(directory, options, output)
    cut_off = read_lines(tmp_path / "out.jsonl.part")
    assert [line["id"] for line in cut_off] == ["short"]
    held = held_blocks(two_daemons.endpoints)
    assert all(3 <= count <= 127 for count in held)  # of the requests that wait for a driver
    for name in two_daemons.endpoints:  # on each rank, as many as wait for a driver
        assert 3 <= status_of(name).num_requests <= 5
    frame = run_client(
        directory, "top", "--once", "--endpoints", ",".join(two_daemons.endpoints)
    ).stdout.splitlines()
    assert re.match(r" all 2 of 2 ranks +[345] ", frame[2])
    shown = run_client(directory, "status", "--endpoints", two_daemons.endpoints[0]).stdout
    assert f"kv cache   {held[0]} of 127 blocks held\n" in shown
    done = run_client(directory, *options, "--adopt", "--output", str(output))
    assert [status_of(name).num_kv_blocks_held for name in two_daemons.endpoints] == [0, 0]
    assert [status_of(name).num_requests for name in two_daemons.endpoints] == [0, 0]
    # A step that ends one and begins another may have come to one rank alone.
    running = [f"{count} requests are running" for count in (3, 4, 5)]
    assert done.stderr.splitlines()[-1] in running
    assert read_lines(output)[:1] == cut_off
    for ours, theirs in zip(read_lines(output), expected, strict=True):
        for field in ("id", "token_ids", "finish_reason", "num_prompt_tokens"):
            assert ours[field] == theirs[field]


def test_run_that_a_full_disk_ended_is_finished_by_the_next(
    directory, tmp_path, options, input_file
):
    """A file size limit simulates a full disk: the second line fits in part."""
    source, expected = input_file
    options, output = (*options, "--input", str(source)), tmp_path / "out.jsonl"
    output.write_text("of another run\n")
    words = [*CLIENT, *options, "--output", str(output)]
    limit = len(json.dumps(expected[0])) + 40
    done = subprocess.run(
        ["prlimit", f"--fsize={limit}", *words],
        env=environment(directory, PYTHONDONTWRITEBYTECODE="1"),
        capture_output=True,
        text=True,
        check=False,
        timeout=COMMAND_LIMIT_S,
    )
    assert done.returncode == ExitCode.OUTPUT, done.stderr
    assert [line["id"] for line in read_lines(tmp_path / "out.jsonl.part")] == ["short"]
    assert output.read_text() == "of another run\n"
    run_client(directory, *options, "--adopt", "--output", str(output))
    lines = [(line["id"], line["token_ids"]) for line in read_lines(output)]
    assert lines == [(line["id"], line["token_ids"]) for line in expected]
    assert list(tmp_path.iterdir()) == [output]


def test_running_requests_are_finished_without_their_input(
    directory, tmp_path, options, input_file
):
    source, expected = input_file
    output, other = tmp_path / "out.jsonl", tmp_path / "other.jsonl"
    kill_in_the_middle(directory, (*options, "--input", str(source)), output)
    other.write_text(json.dumps({"id": "long 0", "prompt_token_ids": [1]}) + "\n")
    refused = run_client(directory, *options, "--adopt", "--input", str(other), check=False)
    assert refused.returncode == 2
    assert "another prompt" in refused.stderr
    run_client(directory, *options, "--adopt", "--output", str(output))
    lines = {line["id"]: line["token_ids"] for line in read_lines(output)}
    assert {"short", "long 0", "long 1", "long 2"} <= set(lines)
    everything = {line["id"]: line["token_ids"] for line in expected}
    assert lines == {name: everything[name] for name in lines}

"""Runs of generate and bench on replicas, over fake daemons: who serves what, and what ends a
run."""

import json
import random
import threading
import time
from dataclasses import replace

import pytest

from tests.support.exhaustive import seeds
from tests.support.fake_daemon import FakeDaemon, Fault, reference_tokens
from worker_client.cli.devices import Device
from worker_client.cli.run_options import build_run_options
from worker_client.cli.session import open_session, read_inputs
from worker_client.errors import ClientConfigError, ReplicasMissing, WorkerDied

EOS = frozenset({7})


@pytest.fixture
def options_of(tmp_path):
    """Options of a run on fake daemons."""

    def make(daemons, **options):
        endpoints = ",".join(daemons.endpoints)
        return build_run_options(
            model=tmp_path, endpoints=endpoints, num_gpu_blocks=256, block_size=4, **options
        )

    return make


def inputs_of(*lengths, **fields):
    lines = [
        {"id": f"r{length}", "prompt_token_ids": [*range(length)], "max_tokens": 12, **fields}
        for length in lengths
    ]
    return read_inputs([json.dumps(line) for line in lines], None, 0)


def expected(*lengths):
    return {f"r{length}": reference_tokens(range(length), 12, EOS) for length in lengths}


def admitted(daemon):
    return {new.req_id for each in daemon.executes for new in each.scheduled_new_reqs}


@pytest.mark.parametrize(("dp", "tp"), [(1, 2), (2, 1), (3, 2)])
def test_requests_are_shared_out_to_the_replicas(fakes, options_of, dp, tp):
    found = fakes(dp * tp)
    options = options_of(found, data_parallel_size=dp, tensor_parallel_size=tp)
    taken = []
    with open_session(options) as session:
        served = session.serve(inputs_of(*range(1, 8)), (), lambda *outcome: taken.append(outcome))
        assert {name: out.token_ids for name, out in served.outputs.items()} == expected(
            *range(1, 8)
        )
        assert sorted(name for name, _ in taken) == [f"r{length}" for length in range(1, 8)]
        assert served.timings.keys() == served.outputs.keys() and not served.errors
        assert 0 < served.startup_s["first_token"] < served.startup_s["total"]
    shares = [admitted(daemon) for daemon in found.daemons]
    assert {len(share) for share in shares} == {7 // dp, -(-7 // dp)}
    for dp_rank in range(dp):
        assert len({frozenset(s) for s in shares[dp_rank * tp : (dp_rank + 1) * tp]}) == 1
    assert len(served.records) == sum(daemon.num_executes for daemon in found.daemons[::tp])


def test_samples_of_a_prompt_are_on_one_replica(fakes, options_of):
    found = fakes(2)
    with open_session(options_of(found, data_parallel_size=2)) as session:
        session.serve([*inputs_of(5, n=3, temperature=0.5), *inputs_of(2, 3)])
    first, second = map(admitted, found.daemons)
    assert (len(first), second) == (3, {"r2", "r3"})


def test_wrong_lines_fail_alone(fakes, options_of):
    found = fakes(2)
    inputs = read_inputs(
        [json.dumps({"prompt_token_ids": ids, "max_tokens": 2}) for ids in ([1], [5000], [2], [3])],
        None,
        0,
    )
    with open_session(options_of(found, data_parallel_size=2)) as session:
        served = session.serve(inputs)
    assert (served.outputs.keys(), served.errors.keys()) == ({"0", "2", "3"}, {"1"})


@pytest.mark.parametrize("measured", [False, True])
@pytest.mark.parametrize("seed", seeds(2, of=12))
def test_requests_of_a_lost_replica_go_on_in_the_others(fakes, options_of, capsys, seed, measured):
    """It has no successor. Some of its requests have tokens, others have not arrived."""
    rng = random.Random(seed)
    found = fakes(3)
    found.daemons[rng.randrange(3)].faults = [Fault(rng.randrange(12), "die")]
    lengths = rng.sample(range(1, 30), 12)
    inputs = [replace(each, arrival_s=rng.uniform(0, 0.1)) for each in inputs_of(*lengths)]
    ended = []
    with open_session(options_of(found, data_parallel_size=3, replace_within=0.0)) as session:
        served = session.serve(inputs, (), lambda name, _: ended.append(name), measured=measured)
    assert {name: out.token_ids for name, out in served.outputs.items()} == expected(*lengths)
    assert sorted(ended) == sorted(served.outputs) and not served.errors
    assert served.timings.keys() == served.outputs.keys()
    for timing in served.timings.values():
        assert timing.added <= timing.first_token <= timing.finished
    num_tokens = sum(len(out.token_ids) for out in served.outputs.values())
    assert len(served.token_gaps_s) == (num_tokens - len(lengths)) * measured
    assert "has ended, and the others go on" in capsys.readouterr().err


@pytest.mark.parametrize("more", [(), ("--profile", "run")])
def test_bench_measures_the_replicas_that_are_left(fakes, run, tmp_path, more):
    found = fakes(2)
    found.daemons[0].faults = [Fault(4, "die")]
    words = ["--endpoints", ",".join(found.endpoints), "--model", tmp_path, "--replace-within", 0]
    words += ["--input", tmp_path / "in.jsonl", "--data-parallel-size", 2, *more]
    lines = [{"prompt_token_ids": [*range(length)], "max_tokens": 12} for length in range(1, 9)]
    (tmp_path / "in.jsonl").write_text("\n".join(map(json.dumps, lines)))
    code, out, errors = run("bench", *words, "--json")
    assert code == 0, errors
    result = json.loads(out)
    assert (result["requests"], result["failed"]) == (8, 0)
    assert len(result.get("traces", ())) == len(more) // 2
    assert "replica 0 has ended" in errors


def test_run_ends_once_no_replica_is_left(fakes, options_of):
    found = fakes(2)
    for daemon in found.daemons:
        daemon.faults = [Fault(4, "die")]
    ended = []
    options = options_of(found, data_parallel_size=2, replace_within=0.0)
    with open_session(options) as session, pytest.raises(WorkerDied):
        session.serve(inputs_of(1, 2, 3, 4), (), lambda name, _: ended.append(name))
    assert not ended


def test_request_that_kills_daemons_fails_alone(fakes, options_of):
    found = fakes(4)
    for daemon in found.daemons:
        dying_of("r9", daemon)
    with open_session(options_of(found, data_parallel_size=4, replace_within=0.0)) as session:
        served = session.serve(inputs_of(*range(1, 10)))
    assert sum(daemon.is_running for daemon in found.daemons) == 1
    assert {name: out.token_ids for name, out in served.outputs.items()} == expected(*range(1, 9))
    assert [*served.errors] == ["r9"] and "3 replicas" in served.errors["r9"]


def dying_of(req_id: str, daemon: FakeDaemon) -> None:
    """Let a daemon die when it admits a request."""
    admit = daemon._admit

    def dying(requests, arrays):
        if any(new.req_id == req_id for new in requests):
            daemon._stop.set()
            daemon._depart = lambda *_, **__: None
        admit(requests, arrays)

    daemon._admit = dying


def test_rank_that_is_restarted_is_waited_for_beside_the_other_replica(fakes, options_of):
    found = fakes(2)
    found.daemons[1].faults = [Fault(4, "die")]

    def follow() -> None:
        found.daemons[1]._thread.join()
        time.sleep(0.5)
        found.daemons[1] = FakeDaemon(found.daemons[1].endpoint).start()

    thread = threading.Thread(target=follow)
    thread.start()
    with open_session(options_of(found, data_parallel_size=2)) as session:
        served = session.serve(inputs_of(*range(1, 7)))
    thread.join()
    assert {name: out.token_ids for name, out in served.outputs.items()} == expected(*range(1, 7))
    assert found.daemons[0].operations.count("CommitAttach") == 1


def test_replicas_that_lack_a_daemon_are_named(fakes, options_of):
    found = fakes(3)
    found.daemons[2].kill()
    with (
        pytest.raises(ReplicasMissing, match="replica 2 lacks rank 2"),
        open_session(options_of(found, data_parallel_size=3)),
    ):
        pass


def test_commands_refuse_a_replica_with_another_model(fakes, run, tmp_path):
    found = fakes(2)
    own, other = tmp_path / "own", tmp_path / "other"
    for path in (own, other):
        path.mkdir()
    (tmp_path / "in.jsonl").write_text('{"prompt_token_ids": [1, 2], "max_tokens": 12}')
    words = ["--input", tmp_path / "in.jsonl", "--num-gpu-blocks", 256, "--block-size", 4]
    both = ["--endpoints", ",".join(found.endpoints), "--data-parallel-size", 2, "--model", own]
    assert run("generate", *words, "--endpoints", found.endpoints[1], "--model", other)[0] == 0
    for command in ("generate", "bench"):
        code, out, errors = run(command, *words, *both)
        assert code and not out
        for part in ("model.model", "/own' != '", "/other'", "--reload", found.endpoints[1]):
            assert part in errors
    assert [daemon.load for daemon in found.daemons] == ["CREATED", "READY"]
    assert run("generate", *words, *both, "--reload")[0] == 0


def test_endpoints_are_those_of_all_replicas(fakes, options_of):
    options = options_of(fakes(3), data_parallel_size=2)
    message = r"data_parallel_size 2 .* needs 2 daemons"
    with pytest.raises(ClientConfigError, match=message), open_session(options):
        pass


def test_local_daemons_are_started_for_all_replicas(tmp_path, monkeypatch):
    asked = []

    def start(devices, model_root, **_):
        asked.append(devices)
        raise ClientConfigError("enough", field="a", value=1, fix="b")

    monkeypatch.setattr("worker_client.driven_group.LocalDaemons", start)
    sizes = {"data_parallel_size": 2, "pipeline_parallel_size": 3}
    for device, names in (
        (Device.CPU, ("cpu",) * 6),
        (Device.CUDA, tuple(f"cuda:{i}" for i in range(6))),
    ):
        options = build_run_options(model=tmp_path, device=device, **sizes)
        with pytest.raises(ClientConfigError, match="enough"), open_session(options):
            pass
        assert asked.pop() == names

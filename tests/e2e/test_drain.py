"""`worker-client drain`: daemons that keep their state but take no steps, and their driver's
reaction."""

import json
import shutil
import signal
import time
from contextlib import closing

import pytest

from rpc_schema import lifecycle as lc
from rpc_schema.driver_digest import driver_digest
from rpc_schema.error_replies import ControlErrorReply, ErrorReply
from rpc_schema.errors import DrainingError, ErrorCode
from rpc_schema.health import CheckHealth
from rpc_schema.step import ModelRunnerOutput
from tests.support.command_line import probe, run_client, short_directory, start_client
from tests.support.driving import random_cases
from tests.support.serving import connect, scheduler_limits, worker_config
from tests.support.stopping import stop_process
from tests.support.waiting import PATIENCE_S, wait_until
from tests.unit.server.driver import DaemonProcess
from tests.unit.server.driver import Driver as BareDriver
from worker_client.driver import Driver
from worker_client.scheduler import Scheduler
from worker_host.exit_codes import ExitCode


@pytest.fixture
def directory():
    path = short_directory()
    yield path
    shutil.rmtree(path)


@pytest.fixture
def fake(directory):
    """A daemon with the fake worker."""
    daemon = DaemonProcess(directory / "d", "--state-dir", str(directory / "s"))
    wait_until(lambda: (directory / "d" / "w0.events").exists(), "it listens", 20.0)
    yield daemon
    daemon.stop()


@pytest.fixture
def bare(fake):
    """A driver of that daemon, which ignores heartbeats."""
    driver = BareDriver(fake.endpoint)
    driver.attach()
    driver.make_ready()
    yield driver
    driver.close()


def statuses(directory, endpoints):
    return json.loads(run_client(directory, "status", "--endpoints", endpoints, "--json").stdout)


def test_driver_stops_when_its_group_drains_and_goes_on_when_that_is_undone(
    daemons, checkpoint, directory
):
    endpoints = daemons.endpoints(2)
    named = ",".join(endpoints)
    cases = random_cases(checkpoint(), seed=51, count=3, max_tokens=40)
    with connect(endpoints, worker_config(checkpoint().path, pp=2)) as (group, loaded):
        driver = Driver(group, Scheduler(scheduler_limits(group, loaded)))
        for request in cases.requests:
            driver.add_request(request)
        outputs = driver.step()
        command = start_client(directory, "drain", "--endpoints", named)
        wait_until(lambda: drains(group), "all ranks drain", 60.0)
        with pytest.raises(DrainingError, match="drain --undo") as stopped:
            while driver.busy:
                outputs += driver.step()
        assert stopped.value.code is ErrorCode.DRAINING
        assert group.num_in_flight == 0
        said, complaints = command.communicate(timeout=PATIENCE_S)
        assert command.returncode == 0, complaints
        assert [line.partition(": ")[0] for line in said.splitlines()] == endpoints
        assert all("DRAINING, its driver: " in line for line in said.splitlines())
        for status in statuses(directory, named):
            assert (status["serving"], status["load"]) == ("DRAINING", "READY")
            assert (status["link_state"], status["lease"]["state"]) == ("up", "held")
        assert all(reply.healthy for reply in group.check_health())
        with pytest.raises(DrainingError):
            driver.step()
        said = run_client(directory, "drain", "--endpoints", named, "--undo").stdout
        assert said.count("SERVING") == 2
        wait_until(lambda: is_served_again(driver, outputs), "the driver goes on", 60.0)
        outputs += driver.run()
    assert {output.req_id: output.token_ids for output in outputs} == cases.expected


@pytest.fixture
def both_probes(fake, directory):
    """both_probes(what): the outcome of the probe, which `status --probe` shares."""

    def run(what: str) -> tuple[int, str]:
        small = probe(directory, fake.endpoint, what)
        words = ("status", "--endpoints", fake.endpoint, "--probe", what)
        large = run_client(directory, *words, check=False)
        assert not small.stdout and not large.stdout
        assert (small.returncode, small.stderr) == (large.returncode, large.stderr)
        return small.returncode, small.stderr

    return run


def test_probes_tell_a_supervisor_where_a_daemon_is(fake, directory, both_probes):
    def answers():
        return [probe(directory, fake.endpoint, what).returncode for what in ("live", "ready")]

    both = ("--endpoints", fake.endpoint, "--probe", "live", "--json")
    assert "leave out --json" in run_client(directory, "status", *both, check=False).stderr
    assert answers() == [0, 1]
    expected = f"{fake.endpoint}: its model is not ready: CREATED\n"
    assert both_probes("ready") == (1, expected)
    with closing(BareDriver(fake.endpoint)) as driver:
        driver.attach()
        driver.make_ready()
        assert answers() == [0, 0]
        run_client(directory, "drain", "--endpoints", fake.endpoint)
        assert answers() == [0, 1]
        assert "DRAINING" in probe(directory, fake.endpoint, "ready").stderr


def test_probes_of_a_daemon_that_does_not_answer_end_with_an_error(fake, both_probes):
    """A stopped process listens, and the kernel takes connections for it."""
    assert both_probes("live") == (0, "")
    stop_process(fake.process.pid)
    code, error = both_probes("live")
    assert code == 2
    assert error.startswith("error: DeadlineExceeded: ") and fake.endpoint in error
    fake.process.send_signal(signal.SIGCONT)
    assert both_probes("live") == (0, "")
    fake.stop()
    code, error = both_probes("ready")
    assert code == 2
    assert error.startswith("error: NothingListens: ") and fake.endpoint in error


def test_wrong_options_of_a_probe_are_named(directory):
    for options, what in (
        (("--endpoints", " , "), "endpoints"),
        (("--endpoints", "ipc:///w0", "--wait", "soon"), "wait"),
        (("--endpoints", "ipc:///w0", "--wait", "-1"), "wait"),
        (("--endpoints", "tcp://h:5555"), "endpoint"),
        (("--endpoints", "ipc:///w0", "--key-file", "k"), "known_daemons"),
    ):
        done = probe(directory, "", "live", *options)
        (line,) = done.stderr.splitlines()
        assert done.returncode == 2
        assert f"; field {what} = " in line and "; fix: " in line
    done = probe(directory, "ipc:///w0", "alive")
    assert (done.returncode, "'live', 'ready'" in done.stderr) == (2, True)


def drains(group):
    return all(status.serving == "DRAINING" for status in group.get_status())


def is_served_again(driver, outputs):
    try:
        outputs += driver.step()
    except DrainingError:
        time.sleep(0.05)
        return False
    return True


def test_running_step_ends_and_later_ones_are_refused_until_the_drain_is_undone(
    fake, bare, directory
):
    bare.send_step_until(directory / "over")
    command = start_client(directory, "drain", "--endpoints", fake.endpoint)
    wait_until(lambda: bare.status().serving == "DRAINING", "it drains", 60.0)
    assert not bare.results.poll(1500)  # beyond the notice that its driver is given
    (directory / "over").touch()
    assert isinstance(bare.reply(), ModelRunnerOutput)
    said, complaints = command.communicate(timeout=PATIENCE_S)
    assert command.returncode == 0, complaints
    assert said.startswith(
        f"{fake.endpoint}: DRAINING, its driver: {driver_digest(bare.driver_id).hex()[:8]}"
    )
    for _ in range(2):
        refused = bare.fault()
        assert isinstance(refused, ErrorReply)
        assert (refused.code, refused.seq) == (ErrorCode.DRAINING, bare.seq)
        bare.seq -= 1  # it was not taken
    for force in (False, True):
        late = bare.call(lc.PrepareAttach, driver_id=bare.driver_id, epoch=99, force=force)
        assert isinstance(late, ControlErrorReply)
        assert late.code is ErrorCode.DRAINING
    health = bare.call(CheckHealth)
    assert health.healthy
    run_client(directory, "drain", "--endpoints", fake.endpoint, "--undo")
    assert isinstance(bare.fault(), ModelRunnerOutput)
    assert bare.status().serving == "SERVING"


def test_drained_daemon_ends_in_order(fake, bare, directory):
    bare.call(lc.Detach, epoch=bare.epoch)
    run_client(directory, "drain", "--endpoints", fake.endpoint)
    source = directory / "in.jsonl"
    source.write_text('{"prompt_token_ids": [1], "max_tokens": 1}\n')
    words = ("--model", str(directory), "--endpoints", fake.endpoint, "--input", str(source))
    refused = run_client(directory, "generate", *words, check=False)
    assert (refused.returncode, "DrainingError" in refused.stderr) == (ExitCode.RETRY_LATER, True)
    fake.process.send_signal(signal.SIGTERM)
    assert fake.wait(PATIENCE_S) == 0
    assert not (directory / "d").exists()

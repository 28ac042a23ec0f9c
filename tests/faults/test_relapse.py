"""Row 18 of the fault matrix: living ranks that wait forever, because one does not send what
another expects. The link is replaced; if that hangs too, new processes replace the waiting ones."""

import time

from tests.support.driving import random_cases
from tests.support.faulty_daemon import Fault, FaultyDaemons
from tests.support.serving import connect, scheduler_limits, worker_config
from worker_client.driver import Driver
from worker_client.scheduler import Scheduler
from worker_host.exit_codes import ExitCode

DEADLINE_S = 1.0
STEPS_BEFORE = 4


def test_row_18_second_hang_ends_the_daemon_and_its_successor_serves(
    model_root, tmp_path, checkpoint, detection
):
    cases = random_cases(checkpoint(), seed=100, count=4, max_tokens=16)
    config = worker_config(checkpoint().path, 2, step_deadline_ms=int(DEADLINE_S * 1000))
    mute_at, failed, replaced = [], [], []
    with FaultyDaemons(2, model_root, tmp_path) as daemons:

        def act(_) -> None:
            if len(driver.records) == STEPS_BEFORE:
                daemons.faults[0].put(Fault("send", "skip", times=1000))
                mute_at.append(time.monotonic())

        def recover(died) -> None:
            failed.append(died.rank)
            daemons.faults[0].path.unlink(missing_ok=True)
            replaced.append(group.replace(died.rank))

        with (
            daemons.kept_alive() as processes,
            connect(daemons.endpoints, config) as (group, loaded),
        ):
            driver = Driver(group, Scheduler(scheduler_limits(group, loaded)), act, recover=recover)
            for request in cases.requests:
                driver.add_request(request)
            tokens = {output.req_id: output.token_ids for output in driver.run()}
            hung = [e for e in group.watch.events if e.kind == "hung" and e.rank == 1]
            dead = [e for e in group.watch.events if e.kind == "dead"]
        log = daemons.log_tail(1)
    assert tokens == cases.expected
    assert len(hung) >= 2 and failed
    ended = [process for process in processes if process.poll() is not None]
    assert processes[1] in ended
    assert {process.returncode for process in ended} == {ExitCode.LINK_UNUSABLE}
    assert "the process ends with 88: ExecuteModel hangs on link" in log
    assert {e.rank for e in dead} == {rank for one in replaced for rank in one.ranks}
    noticed_s = hung[0].at - mute_at[0]
    detection(18, "nothing is sent: hang reported", DEADLINE_S + 1.0, noticed_s, "progress")
    relapsed_s = dead[0].at - hung[-1].at
    detection(18, "second hang: the process ends with 88", 2.0, relapsed_s, "transport")

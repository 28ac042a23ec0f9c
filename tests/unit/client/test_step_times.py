"""A driver's own record of its steps."""

import time

import numpy as np

from rpc_schema.codec import MAX_CONTROL_BYTES, encode_control
from rpc_schema.trace import MAX_DRIVER_STEPS, PutDriverSteps
from worker_client.scheduler_output import SchedulerOutput
from worker_client.tracing.clocks import Offset
from worker_client.tracing.step_times import StepHistory

AHEAD = 10**15
CLOCK = Offset(5, AHEAD, 3)


def everything(times):
    return times.between(0, 2**62, CLOCK)


def numbers(raw, kind="<i8"):
    return np.frombuffer(raw, kind).tolist()


def test_each_step_has_its_moments_and_its_tokens():
    times = StepHistory()
    began = time.monotonic_ns()
    times.sent(3, began, SchedulerOutput({"a": 7, "b": 1, "c": 2}, ("d", "e")))
    times.sent(4, began + 1, None)
    times.sent(5, began + 2, SchedulerOutput({}, ("d",)))
    times.failed(4)
    times.settled(3)
    times.settled(4)  # too late
    times.settled(99)  # nobody's
    after = time.monotonic_ns()
    steps = everything(times)
    assert numbers(steps.seqs) == [3, 4, 5]
    assert numbers(steps.began_ns) == [began, began + 1, began + 2]
    assert numbers(steps.context_tokens, "<i4") == [9, 0, 0]
    assert numbers(steps.generation_tokens, "<i4") == [3, 0, 1]
    assert all(began <= moment <= after for moment in numbers(steps.sent_ns))
    settled = numbers(steps.settled_ns)
    assert began <= settled[0] <= after
    assert settled[1:] == [0, 0]
    assert (steps.clock_offset_ns, steps.clock_bound_ns, steps.clock_at_ns) == (AHEAD, 3, 5)


def test_only_steps_of_the_window_of_the_daemon_s_clock():
    times = StepHistory()
    for seq in range(1, 6):
        times.sent(seq, time.monotonic_ns(), None)
        times.settled(seq)
    steps = everything(times)
    begin, end = numbers(steps.settled_ns)[1], numbers(steps.began_ns)[3]
    chosen = times.between(begin + AHEAD, end + AHEAD, CLOCK)
    assert numbers(chosen.seqs) == [2, 3, 4]
    times.clear()
    assert numbers(everything(times).seqs) == []


def test_the_most_that_is_kept_fits_a_message():
    times = StepHistory()
    for seq in range(MAX_DRIVER_STEPS + 10):
        times.sent(seq, 1, None)
    steps = everything(times)
    assert len(numbers(steps.seqs)) == MAX_DRIVER_STEPS
    assert numbers(steps.seqs)[-1] == MAX_DRIVER_STEPS + 9
    message = PutDriverSteps(call=1, epoch=1, trace=bytes(16), steps=steps)
    assert len(encode_control(message)) < MAX_CONTROL_BYTES

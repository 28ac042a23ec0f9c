"""The path of a steady step through the daemon stays within few files and calls."""

import json
import sys
from collections import Counter

import pytest

from tests.support.serving import (
    LOOKUPS,
    NO_DRAFTS,
    assert_greedy,
    connect,
    generate,
    greedy_request,
    worker_config,
)
from worker_client.launcher import LocalDaemons

MOST_FILES = 14
MOST_CALLS = 60
"""From the step message to its reply, on both threads, without the forward pass."""
MOST_DRAFTED_CALLS = 105
"""The same for a step with drafts, which are verified and made behind the forward pass."""
MOST_INPUT_CALLS = 32
"""Of a step with drafts, from its message to the forward pass."""


@pytest.fixture
def traces(tmp_path, model_root, checkpoint):
    """Return a function: the traces of a run with these drafts, which had the same tokens as
    without."""

    def run(speculative):
        file = tmp_path / "trace.json"

        def command(endpoint, device, pipe):
            serve = (sys.executable, "-m", "tests.support.traced_serve", str(file), "serve")
            options = ("--endpoint", endpoint, "--device", device)
            options += ("--exit-with-parent-fd", str(pipe))
            return (*serve, *options, "--model-root", str(model_root))

        daemons = LocalDaemons(["cpu"], model_root, command=command)
        requests = [greedy_request(f"r{index}", [3 + index, 5, 9] * 2, 24) for index in range(4)]
        config = worker_config(checkpoint().path, block_size=16, speculative=speculative)
        try:
            with connect(daemons.endpoints, config) as served:
                assert_greedy(generate(*served, requests), checkpoint(), requests)
        finally:
            daemons.stop()
        found = json.loads(file.read_text())
        return {name: [tuple(call) for call in calls] for name, calls in found.items()}

    return run


def described(calls):
    files = Counter(name for name, _ in calls)
    return f"{len(files)} files, {len(calls)} calls\n" + "\n".join(map(" ".join, calls))


def test_steady_decode_enters_few_files(traces):
    calls = traces(NO_DRAFTS)["plain"]
    assert ("worker_daemon/runner/model_runner.py", "execute_model") in calls
    assert ("worker_daemon/server/wire/reply_channel.py", "reply") in calls
    num_files = len({name for name, _ in calls})
    assert num_files <= MOST_FILES and len(calls) <= MOST_CALLS, described(calls)


def test_steady_step_with_drafts_makes_few_calls(traces):
    found = traces(LOOKUPS["ngram"])
    whole, inputs = found["drafted"], found["inputs"]
    assert ("worker_daemon/runner/input_batch.py", "build") in inputs
    assert ("worker_daemon/server/wire/reply_channel.py", "reply") in whole
    assert len(whole) <= MOST_DRAFTED_CALLS, described(whole)
    assert len(inputs) <= MOST_INPUT_CALLS, described(inputs)

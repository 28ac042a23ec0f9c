"""The path of a steady decode through the daemon stays within few files and calls."""

import json
import sys
from collections import Counter

from tests.support.serving import assert_greedy, connect, generate, greedy_request, worker_config
from worker_client.launcher import LocalDaemons

MOST_FILES = 14
MOST_CALLS = 60
"""From the step message to its reply, on both threads, without the forward pass."""


def test_steady_decode_enters_few_files(tmp_path, model_root, checkpoint):
    trace = tmp_path / "trace.json"

    def command(endpoint, device, pipe):
        serve = (sys.executable, "-m", "tests.support.traced_serve", str(trace), "serve")
        options = ("--endpoint", endpoint, "--device", device, "--exit-with-parent-fd", str(pipe))
        return (*serve, *options, "--model-root", str(model_root))

    daemons = LocalDaemons(["cpu"], model_root, command=command)
    requests = [greedy_request(f"r{index}", [3 + index, 5, 9], 12) for index in range(4)]
    try:
        with connect(daemons.endpoints, worker_config(checkpoint().path, block_size=16)) as served:
            assert_greedy(generate(*served, requests), checkpoint(), requests)
    finally:
        daemons.stop()
    calls = [tuple(call) for call in json.loads(trace.read_text())]
    assert ("worker_daemon/runner/model_runner.py", "execute_model") in calls
    assert ("worker_daemon/server/wire/reply_channel.py", "reply") in calls
    files = Counter(name for name, _ in calls)
    seen = f"{len(files)} files, {len(calls)} calls\n" + "\n".join(map(" ".join, calls))
    assert len(files) <= MOST_FILES and len(calls) <= MOST_CALLS, seen

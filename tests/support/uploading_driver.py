"""`python -m tests.support.uploading_driver NUM_BYTES NUM_CHUNKS TTL_S ENDPOINT ...`: a driver of a
loaded pipeline. It sends NUM_CHUNKS chunks of a tensor, checks that the daemons have room for it,
prints `ready`, and waits to be killed."""

import subprocess
import sys
import time
from collections.abc import Sequence

from rpc_schema.config import ParallelConfig
from tests.support.forked_processes import ForkedPopen
from worker_client.group.uploads import HostTensor
from worker_client.wire.lease import LeaseTerms
from worker_client.worker_group import WorkerGroup


def tensor(num_bytes: int) -> HostTensor:
    """Return the tensor that it sends."""
    return HostTensor.from_bytes("uint8", (num_bytes,), b"\x5a" * num_bytes)


def kill_halfway(num_bytes: int, num_chunks: int, ttl_s: float, endpoints: Sequence[str]) -> None:
    """Start the driver, and kill it once it is ready."""
    words = [str(num_bytes), str(num_chunks), str(ttl_s), *endpoints]
    command = [sys.executable, "-m", "tests.support.uploading_driver", *words]
    with ForkedPopen(command, stdout=subprocess.PIPE, text=True) as process:
        try:
            assert process.stdout is not None
            assert process.stdout.readline() == "ready\n"
        finally:
            process.kill()


def main(num_bytes: int, num_chunks: int, ttl_s: float, endpoints: Sequence[str]) -> None:
    """Run the driver."""
    parallel = ParallelConfig(pipeline_parallel_size=len(endpoints))
    with WorkerGroup(endpoints, parallel, lease=LeaseTerms(ttl_s=ttl_s)) as group:
        group.attach()
        uploading = group.uploads.begin([tensor(num_bytes)])
        for _ in range(num_chunks):
            assert uploading.proceed()
        held = [status.upload_bytes for status in group.get_status()]
        assert held == [num_bytes] * len(endpoints), held
        print("ready", flush=True)
        time.sleep(60)


if __name__ == "__main__":
    main(int(sys.argv[1]), int(sys.argv[2]), float(sys.argv[3]), sys.argv[4:])

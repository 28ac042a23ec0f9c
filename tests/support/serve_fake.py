"""A fake daemon as a process: python -m tests.support.serve_fake ENDPOINT PARENT_FD [MODE]."""

import os
import sys
import time

from tests.support.fake_daemon import FakeDaemon


def main() -> None:
    endpoint, parent_fd, mode = sys.argv[1], int(sys.argv[2]), sys.argv[3]
    if mode == "exit":
        sys.exit("no such device")
    if mode == "silent":
        time.sleep(60)
    daemon = FakeDaemon(endpoint).start()
    os.read(parent_fd, 1)
    daemon.stop()


if __name__ == "__main__":
    main()

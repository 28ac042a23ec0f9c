"""`python -m worker_daemon` and the script `worker-daemon`."""

from worker_daemon.cli import app


def main() -> None:
    """Run the command line."""
    app()


if __name__ == "__main__":
    main()

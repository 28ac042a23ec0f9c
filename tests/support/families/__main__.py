"""See the package."""

from tests.support import families
from worker_daemon.cli import app
from worker_daemon.models import registry

if __name__ == "__main__":
    registry.FAMILIES = families.all_families()
    app()

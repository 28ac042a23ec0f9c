"""Our scheduler for tests that make schedulers without an executor."""

from worker_client.vllm.hooks.scheduler import WorkerDaemonScheduler
from worker_client.vllm.weight_changes import WeightChanges


class _Accepting:
    def salt_hashes(self, request):
        pass

    def find_refusal(self, request):
        return ""

    def is_ready(self, req_id):
        return True

    def proceed(self):
        pass


class AcceptingScheduler(WorkerDaemonScheduler):
    """Schedules any request."""

    def __init__(self, *args, **kwargs) -> None:
        shared = {"translated": _Accepting(), "noted": None, "weights": WeightChanges()}
        super().__init__(*args, **shared, **kwargs)

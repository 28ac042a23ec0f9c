"""The entry point that vLLM asks which platform it runs on. It imports nothing of vLLM's, and is
asked in every vLLM process of this environment."""

from worker_client.vllm.settings import read_endpoints


def register() -> str | None:
    """Return the platform's class where WORKER_DAEMON_ENDPOINTS names daemons; None leaves vLLM to
    its own workers."""
    return "worker_client.vllm.hooks.platform.WorkerDaemonPlatform" if read_endpoints() else None

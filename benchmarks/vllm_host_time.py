"""Host time of a step in vLLM's engine core, and our part of it. Run it with vLLM's interpreter:

    WORKER_DAEMON_ENDPOINTS=EP,... python -m benchmarks.vllm_host_time MODEL [--requests 64 256]

The daemons may be slow: CPU time of the engine's thread counts, without waiting for results.
"""

import argparse
import os
import time
from collections.abc import Callable
from typing import Any

os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"

from vllm import LLM, SamplingParams
from vllm.v1.engine.core import EngineCore

from worker_client.vllm.hooks.executor import WorkerDaemonExecutor
from worker_client.worker_group import WorkerGroup

PROMPT_TOKENS = 32


class Clock:
    """CPU time of this thread inside some methods, nested calls counted once."""

    def __init__(self) -> None:
        self.seconds = 0.0
        self._depth = 0

    def wrap(self, owner: Any, name: str) -> None:
        """Measure a method of a class."""
        method: Callable[..., Any] = getattr(owner, name)

        def measured(*args: Any, **kwargs: Any) -> Any:
            began, self._depth = time.thread_time(), self._depth + 1
            try:
                return method(*args, **kwargs)
            finally:
                self._depth -= 1
                if not self._depth:
                    self.seconds += time.thread_time() - began

        setattr(owner, name, measured)


def main() -> None:
    """Print microseconds of CPU a step: engine core in all, and our executor's part."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("model")
    parser.add_argument("--requests", type=int, nargs="+", default=[64, 256])
    parser.add_argument("--tokens", type=int, default=200)
    options = parser.parse_args()
    core, ours, waits = Clock(), Clock(), Clock()
    core.wrap(EngineCore, "step_with_batch_queue")
    waits.wrap(WorkerGroup, "wait_for")
    for name in ("execute_model", "sample_tokens", "_take"):
        ours.wrap(WorkerDaemonExecutor, name)
    llm = LLM(
        model=options.model,
        max_num_seqs=max(options.requests),
        max_model_len=PROMPT_TOKENS + options.tokens,
        kv_cache_memory_bytes=256 << 20,
        dtype="float32",
        additional_config={"worker_daemon": {"reload": True}},
    )
    params = SamplingParams(max_tokens=options.tokens, temperature=0.0, ignore_eos=True)
    for count in options.requests:
        prompts = [{"prompt_token_ids": [1 + i % 300] * PROMPT_TOKENS} for i in range(count)]
        llm.generate(prompts, SamplingParams(max_tokens=2, temperature=0.0), use_tqdm=False)
        for clock in (core, ours, waits):
            clock.seconds = 0.0
        llm.generate(prompts, params, use_tqdm=False)
        per_step = 1e6 / options.tokens
        whole, own = (each.seconds - waits.seconds for each in (core, ours))
        whole, own = whole * per_step, own * per_step
        print(
            f"{count} requests, {options.tokens} steps: engine core {whole:.0f} us a step, "
            f"our executor {own:.0f} of them ({own / (whole - own):.1%} of vLLM's own)"
        )


if __name__ == "__main__":
    main()

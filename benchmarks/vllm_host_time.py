"""Host time of a step in vLLM's engine core, and our part of it. Run it with vLLM's interpreter:

    WORKER_DAEMON_ENDPOINTS=EP,... python -m benchmarks.vllm_host_time MODEL [--requests 64 256]

The daemons may be slow: CPU time of the engine's thread counts, without waiting for results. A step
that only continues decoding is the median; means have the admissions too.
"""

import argparse
import os
import time
from collections.abc import Callable
from statistics import fmean, median
from typing import Any

os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"

from vllm import LLM, SamplingParams
from vllm.v1.engine.core import EngineCore

from worker_client.group.waiting import Waiter
from worker_client.vllm.hooks.executor import WorkerDaemonExecutor

PROMPT_TOKENS = 32
OURS = ("execute_model", "sample_tokens", "_take")


class Clock:
    """CPU time of this thread inside a method, in microseconds; its calls are not nested."""

    def __init__(self, owner: Any, name: str, end: Callable[[], None] = lambda: None) -> None:
        """Measure a method of a class. end is called after each call."""
        method: Callable[..., Any] = getattr(owner, name)
        self.spent = 0.0

        def measured(*args: Any, **kwargs: Any) -> Any:
            began = time.thread_time_ns()
            try:
                return method(*args, **kwargs)
            finally:
                self.spent += (time.thread_time_ns() - began) / 1000
                end()

        setattr(owner, name, measured)

    def take(self) -> float:
        """Return what was spent since the last call."""
        spent, self.spent = self.spent, 0.0
        return spent


class Steps:
    """Times of vLLM's steps, by part."""

    def __init__(self) -> None:
        self._waits = Clock(Waiter, "wait_for")
        self._ours = {name: Clock(WorkerDaemonExecutor, name) for name in OURS}
        self._core = Clock(EngineCore, "step_with_batch_queue", self._end)
        self.rows: list[dict[str, float]] = []

    def _end(self) -> None:
        waits = self._waits.take()
        parts = {name: clock.take() for name, clock in self._ours.items()}
        whole = self._core.take() - waits
        parts["_take"] -= waits
        ours = sum(parts.values())
        self.rows.append({"core": whole, "ours": ours, "vllm": whole - ours, **parts})

    def report(self) -> str:
        """Return medians and means, and forget the steps."""
        rows, self.rows = self.rows, []
        lines = []
        for name, kind in (("median", median), ("mean", fmean)):
            of = {part: kind(row[part] for row in rows) for part in rows[0]}
            parts = ", ".join(f"{part.strip('_')} {of[part]:.0f}" for part in OURS)
            lines.append(
                f"{name}: engine core {of['core']:.0f} us a step, our executor {of['ours']:.0f} "
                f"of them ({of['ours'] / of['vllm']:.1%} of vLLM's own {of['vllm']:.0f}): {parts}"
            )
        return "\n  ".join([f"{len(rows)} steps", *lines])


def main() -> None:
    """Print microseconds of CPU a step: engine core in all, and our executor's part."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("model")
    parser.add_argument("--requests", type=int, nargs="+", default=[64, 256])
    parser.add_argument("--tokens", type=int, default=200)
    options = parser.parse_args()
    steps = Steps()
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
        steps.rows.clear()
        llm.generate(prompts, params, use_tqdm=False)
        print(f"{count} requests, {steps.report()}")


if __name__ == "__main__":
    main()

"""Prints a GPU's memory after start-up by kind, with the profile's prediction, as one JSON object.

    python -m benchmarks.memory [--model DIR] [--max-model-len N] [--utilization F]
        [--quantization fp8] [--kv-cache-dtype fp8]

Uses dummy weights; the KV cache has the size that the profile returns.
"""

import argparse
import json
import sys
import time
from pathlib import Path

from benchmarks.stage_driver import BLOCK_SIZE, StageDriver
from rpc_schema.config import CacheConfig, Quantization
from rpc_schema.kv_cache import fitting_blocks

_MODEL = Path(__file__).parent / "models" / "llama-8b"


def measure(
    model: Path, max_model_len: int, quantization: Quantization, cache: CacheConfig
) -> dict[str, object]:
    """Start a worker, and return the predicted and the actual memory."""
    driver = StageDriver(model, "cuda:0", max_model_len, quantization=quantization, cache=cache)
    driver.load()
    began = time.monotonic()
    found = driver.profile()
    profiled = time.monotonic()
    num_blocks = fitting_blocks(found.available_bytes, driver.block_bytes())
    driver.serve(num_blocks)
    served = time.monotonic()
    described = driver.worker.describe()
    kinds = dict(described.memory_bytes)
    advice = described.kv_cache_advice
    assert advice is not None, "a worker that is ready has advice"
    driver.leave()
    return {
        "model": model.name,
        "requested_bytes": found.requested_bytes,
        "available_bytes": found.available_bytes,
        "num_blocks": num_blocks,
        "largest_step_bytes": found.activation_peak_bytes,
        "graph_bytes": {"foreseen": found.graph_bytes, "taken": kinds["graphs"]},
        "beyond_the_request_bytes": found.available_bytes - advice.request_bytes,
        "memory_bytes": kinds,
        "advice": {"request": advice.request_bytes, "card": advice.card_bytes},
        "graphs": described.providers["graphs"],
        "profile_s": round(profiled - began, 3),
        "kv_and_warm_up_s": round(served - profiled, 3),
    }


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", type=Path, default=_MODEL)
    parser.add_argument("--max-model-len", type=int, default=4096)
    parser.add_argument("--utilization", type=float, default=0.9)
    parser.add_argument("--quantization", default="auto")
    parser.add_argument("--kv-cache-dtype", default="auto")
    words = parser.parse_args()
    cache = CacheConfig(
        block_size=BLOCK_SIZE,
        gpu_memory_utilization=words.utilization,
        kv_cache_dtype=words.kv_cache_dtype,
    )
    result = measure(words.model.resolve(), words.max_model_len, words.quantization, cache)
    sys.stdout.write(json.dumps(result, indent=1) + "\n")


if __name__ == "__main__":
    main()

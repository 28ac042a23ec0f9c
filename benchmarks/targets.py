"""The project's targets for whole workloads on NVIDIA H200s (source: targets). Numbers only.

Keys are (model, pp x tp, workload); values are minimum tokens per second, or maximum seconds.
"""

from typing import NamedTuple


class Target(NamedTuple):
    """A bound; at_most: an upper one."""

    value: float
    at_most: bool = False

    def met_by(self, value: float) -> bool:
        """Return True if a measured value meets the target."""
        return value <= self.value if self.at_most else value >= self.value


SLEEP = {
    ("llama-8b", "sleep 1"): Target(1.0, at_most=True),
    ("llama-8b", "wake 1"): Target(0.45, at_most=True),
    ("llama-8b", "sleep 2"): Target(0.14, at_most=True),
    ("llama-8b", "wake 2"): Target(0.3, at_most=True),
    ("llama-8b", "device memory asleep 2"): Target(2 * 1.073741824, at_most=True),
}
"""Seconds, and gigabytes of device memory in use, context included."""

STARTUP = {
    ("llama-8b", "1x1", "cold"): Target(15.0, at_most=True),
    ("llama-8b", "1x1", "warm"): Target(7.0, at_most=True),
    ("qwen3-30b-a3b", "1x1", "cold"): Target(30.0, at_most=True),
    ("qwen3-30b-a3b", "1x1", "warm"): Target(15.0, at_most=True),
    ("llama-8b", "2x1", "cold"): Target(30.0, at_most=True),
    ("llama-8b", "1x2", "cold"): Target(30.0, at_most=True),
}
"""Seconds from process start to first token; cold: with an empty kernel cache."""

WEIGHT_UPDATE_SHARE = 0.6
"""Share of the measured link rate that a weight update should reach."""

FP8 = "--quantization fp8 --kv-cache-dtype fp8"
"""Options of runs in FP8."""

WORKLOADS = {
    ("llama-8b", "1x1", "decode_bs1"): Target(262),
    ("llama-8b", "1x1", "decode_bs64"): Target(12_500),
    ("llama-8b", "1x1", "decode_bs256"): Target(26_700),
    ("llama-8b", "1x1", "mixed256"): Target(11_400),
    ("llama-8b", "1x1", "prefill_8x8192"): Target(38_100),
    ("llama-8b", "1x1", "prefill_1x8192"): Target(0.218, at_most=True),
    ("llama-8b", "1x1", "long_32x8000"): Target(9.75, at_most=True),
    ("llama-8b", f"1x1 {FP8}", "decode_bs1"): Target(430),
    ("llama-8b", f"1x1 {FP8}", "decode_bs64"): Target(17_500),
    ("llama-8b", f"1x1 {FP8}", "decode_bs256"): Target(34_000),
    ("llama-8b", f"1x1 {FP8}", "mixed256"): Target(15_400),
    ("llama-8b", f"1x1 {FP8}", "prefill_8x8192"): Target(60_000),
    ("llama-8b", f"1x1 {FP8}", "long_32x8000"): Target(6.5, at_most=True),
    ("qwen3-0.6b", "1x1", "decode_bs1"): Target(1_430),
    ("qwen3-0.6b", "1x1", "decode_bs64"): Target(44_000),
    ("qwen3-0.6b", "1x1", "decode_bs256"): Target(87_000),
    ("qwen3-0.6b", "1x1", "mixed256"): Target(39_000),
    ("qwen3-0.6b", "1x1", "prefill_8x8192"): Target(277_600),
    ("llama-8b", "2x1", "decode_bs1"): Target(255),
    ("llama-8b", "2x1", "decode_bs64"): Target(12_000),
    ("llama-8b", "2x1", "decode_bs256"): Target(37_800),
    ("llama-8b", "2x1", "mixed256"): Target(17_400),
    ("llama-8b", "2x1", "prefill_8x8192"): Target(72_000),
    ("llama-8b", "1x2", "decode_bs1"): Target(400),
    ("llama-8b", "1x2", "decode_bs64"): Target(18_100),
    ("llama-8b", "1x2", "decode_bs256"): Target(41_500),
    ("llama-8b", "1x2", "mixed256"): Target(19_000),
    ("llama-8b", "1x2", "prefill_8x8192"): Target(70_000),
}

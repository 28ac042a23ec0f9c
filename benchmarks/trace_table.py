"""Converts a Chrome trace of torch's profiler to a table of device time by kind of kernel. Pure."""

import re
from collections import defaultdict
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

GROUPS = (
    ("communication", r"nccl|gloo|c10d|all_?reduce|_peer_"),
    ("copies", r"^Memcpy|^Memset|copy_kernel|direct_copy|CatArray"),
    ("attention", r"attend|attention|flash|fmha|_prefill_kernel|_decode_kernel|merge_parts"),
    (
        "gemm",
        r"gemm|gemv|nvjet|cutlass|cublas|xmma|splitK|_row_kernel|_matrix_kernel|_fp8_kernel|linear",
    ),
    ("rope and store", r"rope|rotate|rotary|write_kv|kv_write|store_kv"),
    ("norm", r"norm"),
    ("quantize", r"_rows_kernel|_fused_kernel"),
    ("activation", r"silu|gelu|act_and_mul|activation"),
    ("sampling", r"argmax|greedy|sampl|softmax|sort|topk|philox|gumbel|_store_tokens"),
    ("sampling", r"_scan_kernel|_merge_kernel"),
    ("inputs", r"gather|embedding|index|scatter|_update_blocks|_take_columns"),
)
"""(name, pattern): the first pattern found in a kernel's name determines its group; otherwise
`other`."""
OTHER, GAPS = "other", "gaps"
_DEVICE_EVENTS = frozenset({"kernel", "gpu_memcpy", "gpu_memset"})


@dataclass(frozen=True)
class StepTable:
    """Mean device time of the traced steps, in us."""

    step_us: float
    """Time from the first kernel's start to the last one's end, divided by the number of steps."""
    groups: Mapping[str, float]
    """Time by kind; overlapping kernels count in full, and gaps are times without a kernel."""
    kernels: Mapping[str, float]
    """Time by kernel name."""
    kernels_per_step: float

    def share(self, group: str) -> float:
        """Return a group's share of the step."""
        return self.groups[group] / self.step_us if self.step_us else 0.0


def group_of(kernel: str) -> str:
    """Return a kernel's kind."""
    for group, pattern in GROUPS:
        if re.search(pattern, kernel, re.IGNORECASE):
            return group
    return OTHER


def tabulate(trace: Mapping[str, Any], num_steps: int) -> StepTable:
    """Sum up the device events of a trace over num_steps steps."""
    events = [e for e in trace["traceEvents"] if e.get("cat") in _DEVICE_EVENTS]
    kernels: defaultdict[str, float] = defaultdict(float)
    groups: defaultdict[str, float] = defaultdict(float)
    for event in events:
        kernels[event["name"]] += event["dur"] / num_steps
        groups[group_of(event["name"])] += event["dur"] / num_steps
    span, busy = _span_and_busy((e["ts"], e["ts"] + e["dur"]) for e in events)
    groups[GAPS] = (span - busy) / num_steps
    by_time = sorted(kernels.items(), key=lambda item: -item[1])
    ordered = sorted(groups.items(), key=lambda item: -item[1])
    return StepTable(span / num_steps, dict(ordered), dict(by_time), len(events) / num_steps)


def _span_and_busy(intervals: Iterable[tuple[float, float]]) -> tuple[float, float]:
    """Return the time from the first start to the last end, and the length of the intervals'
    union."""
    busy, first, last = 0.0, None, 0.0
    for start, end in sorted(intervals):
        if first is None:
            first = last = start
        busy += max(0.0, end - max(start, last))
        last = max(last, end)
    return (0.0, 0.0) if first is None else (last - first, busy)

"""Measures whole workloads on real daemons: `python -m benchmarks.e2e --model DIR [--pp P] [--tp T]
[--layer-partition N,N] [--workloads A,B] [--options OPTIONS] [--quick] [--out FILE.json]`.

Starts P x T daemons once; every workload is one `worker-client bench --endpoints` process that
attaches to them, so that only the first one loads the model. A first pass of each workload is
discarded (except mixed256 and --quick).

Times are those of `worker-client bench`: `seconds` runs from the first submission of a request to
the last token of the last one, with all requests submitted at once. It includes client and wire,
but not loading, warm-up and attaching. The figure of a workload is generated tokens over these
seconds for decode_* and mixed256, prompt tokens over them for prefill_8x8192, and the seconds
themselves for prefill_1x8192, long_* and agents_32x4000; prompt tokens also for prefill_512x512 and
embed_512x512. For a model with experts, the experts of a layer that the workload's tokens chose are
printed beside it. Workloads that workloads.NAMES lacks run only if named. During a run, every
daemon's status is polled ten times a second, as a metrics collector would; the reply delay is that
of the last 1024 results.
"""

import argparse
import json
import shlex
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from benchmarks import workloads
from benchmarks.local_group import devices_of
from worker_client.launcher import LocalDaemons

OPTIONS = ("--load-format", "dummy", "--dtype", "bfloat16", "--max-model-len", "16384")
TIMEOUT_S = 300
IN_SECONDS = ("prefill_1x8192", "long_32x8000", "long_4x30000", "agents_32x4000")


@dataclass(frozen=True)
class Run:
    """One workload on one group."""

    model: str
    shape: str
    """pp x tp, and further options."""
    workload: str
    value: float
    unit: str
    result: dict[str, Any]
    """The whole object of `worker-client bench`."""


def figure(workload: str, result: dict[str, Any]) -> tuple[float, str]:
    """Return a workload's figure and its unit."""
    if workload in IN_SECONDS:
        return result["seconds"], "s"
    if workload.startswith(("prefill", "embed")):
        return result["tokens_in"] / result["seconds"], "tok/s in"
    return result["out_tok_s"], "tok/s out"


def slowest_reply_us(result: dict[str, Any]) -> float:
    """Return the highest p99 of the delays from a result on the host to its sent reply; ranks that
    sent none have 0."""
    return max(delay["p99_us"] for delay in result["reply_delay"])


def chosen_experts(result: dict[str, Any]) -> str:
    """Return the number of experts that a layer's tokens were routed to, and their balance, as
    text; empty for a model without experts."""
    if "experts" not in result:
        return ""
    figures = result["experts"]
    return (
        f"  distinct experts {figures['distinct']:.1f} of {figures['num_experts']:.0f} a layer, "
        f"busiest over mean {figures['imbalance']:.2f}"
    )


def bench(model: Path, endpoints: list[str], requests: Path, options: list[str]) -> dict[str, Any]:
    """Run `worker-client bench` once, with the daemons' metrics scraped, and return its object."""
    command = [
        sys.executable,
        "-m",
        "worker_client",
        "bench",
        "--model",
        str(model),
        "--json",
        "--scrape",
    ]
    command += ["--endpoints", ",".join(endpoints), "--input", str(requests), *options]
    done = subprocess.run(command, capture_output=True, timeout=TIMEOUT_S, text=True)
    if done.returncode:
        raise RuntimeError(f"{' '.join(command)} ended with {done.returncode}: {done.stderr}")
    result: dict[str, Any] = json.loads(done.stdout)
    if result["failed"]:
        raise RuntimeError(f"{result['failed']} requests failed: {done.stderr}")
    return result


def group_options(
    pp: int, tp: int, layer_partition: str = "", further: Sequence[str] = ()
) -> list[str]:
    """Return the options of `worker-client bench` for a group of pp x tp. layer_partition: layers
    of each stage, empty for even stages."""
    sizes = ["--pipeline-parallel-size", str(pp), "--tensor-parallel-size", str(tp)]
    partition = ["--layer-partition", layer_partition] if layer_partition else []
    return [*OPTIONS, *sizes, *partition, *further]


def run_group(
    model: Path,
    device: str,
    pp: int,
    tp: int,
    names: list[str],
    quick: bool,
    layer_partition: str = "",
    further: Sequence[str] = (),
) -> list[Run]:
    """Serve the workloads one at a time on one group, and print each. further: options of
    `worker-client bench`."""
    vocab_size = json.loads((model / "config.json").read_text())["vocab_size"]
    devices = devices_of(device, pp * tp)
    options = group_options(pp, tp, layer_partition, further)
    shape = " ".join([f"{pp}x{tp}", *further])
    runs = []
    with (
        tempfile.TemporaryDirectory() as scratch,
        LocalDaemons(devices, model.parent) as daemons,
    ):
        try:
            for name in names:
                requests = Path(scratch) / f"{name}.jsonl"
                with requests.open("w") as file:
                    file.writelines(workloads.json_lines(workloads.make(name, vocab_size)))
                if not quick and name != "mixed256":
                    bench(model, daemons.endpoints, requests, options)
                result = bench(model, daemons.endpoints, requests, options)
                value, unit = figure(name, result)
                run = Run(model.name, shape, name, value, unit, result)
                waits = ", ".join(f"{share:.1%}" for share in result["input_wait_share"])
                bubbles = f"  waiting for input by rank: {waits}" if pp > 1 else ""
                print(
                    f"{run.model} {run.shape} {name:<16} {value:>12.3f} {unit}{bubbles}"
                    f"{chosen_experts(result)}"
                    f"  reply delay p99 {slowest_reply_us(result):.0f} us",
                    flush=True,
                )
                runs.append(run)
        except BaseException:
            for rank in range(len(devices)):
                print(f"# log of rank {rank}\n{daemons.log_tail(rank)}", file=sys.stderr)
            raise
    return runs


def main() -> None:
    """Run one group's workloads; with --out write a list of runs."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", type=Path, required=True)
    parser.add_argument("--device", choices=["cpu", "cuda"], default="cuda")
    parser.add_argument("--pp", type=int, default=1)
    parser.add_argument("--tp", type=int, default=1)
    parser.add_argument("--layer-partition", default="", help="layers of each stage; default: even")
    parser.add_argument("--workloads", default=",".join(workloads.NAMES))
    parser.add_argument(
        "--options",
        default="",
        help="further options of worker-client bench: '--quantization fp8'",
    )
    parser.add_argument("--quick", action="store_true", help="no discarded first pass")
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    names = options.workloads.split(",")
    runs = run_group(
        options.model.resolve(),
        options.device,
        options.pp,
        options.tp,
        names,
        options.quick,
        options.layer_partition,
        shlex.split(options.options),
    )
    if options.out is not None:
        options.out.write_text(json.dumps([asdict(run) for run in runs], indent=1) + "\n")


if __name__ == "__main__":
    main()

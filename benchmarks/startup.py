"""Measures the time from process start to the first token: `python -m benchmarks.startup --model
DIR [--pp P] [--tp T] [--out FILE.json]`.

Runs `worker-client bench` twice with one short request, including the daemons: first with an empty
kernel cache (cold), then with the cache of that run (warm). Each result is its `startup_s` by phase
and the number of files that the run added to the cache; a warm start adds none.
"""

import argparse
import json
import os
import subprocess
import sys
import tempfile
from dataclasses import asdict, dataclass
from pathlib import Path

from benchmarks.e2e import OPTIONS, TIMEOUT_S

REQUEST = {"prompt_token_ids": list(range(1, 33)), "max_tokens": 16, "ignore_eos": True}
UNSET = "TRITON_CACHE_DIR"


@dataclass(frozen=True)
class Start:
    """One start."""

    model: str
    shape: str
    """pp x tp."""
    kind: str
    """cold or warm."""
    startup_s: dict[str, float]
    compiled_files: int


def start(model: Path, cache: Path, kind: str, device: str, pp: int, tp: int) -> Start:
    """Run worker-client once, with XDG_CACHE_HOME at cache."""
    environment = {name: value for name, value in os.environ.items() if name != UNSET}
    before = count_files(cache)
    command = [sys.executable, "-m", "worker_client", "bench", "--model", str(model), "--json"]
    command += [*OPTIONS, "--device", device]
    command += ["--pipeline-parallel-size", str(pp), "--tensor-parallel-size", str(tp)]
    with tempfile.NamedTemporaryFile("w", suffix=".jsonl") as requests:
        requests.write(json.dumps(REQUEST) + "\n")
        requests.flush()
        done = subprocess.run(
            [*command, "--input", requests.name],
            env=environment | {"XDG_CACHE_HOME": str(cache)},
            capture_output=True,
            text=True,
            timeout=TIMEOUT_S,
        )
    if done.returncode:
        raise RuntimeError(f"{' '.join(command)} ended with {done.returncode}: {done.stderr}")
    seconds = json.loads(done.stdout)["startup_s"]
    return Start(model.name, f"{pp}x{tp}", kind, seconds, count_files(cache) - before)


def count_files(directory: Path) -> int:
    """Count the files below a directory."""
    return sum(path.is_file() for path in directory.rglob("*"))


def main() -> None:
    """Start twice, print the phases side by side, and with --out write a list of starts."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", type=Path, required=True)
    parser.add_argument("--device", choices=["cpu", "cuda"], default="cuda")
    parser.add_argument("--pp", type=int, default=1)
    parser.add_argument("--tp", type=int, default=1)
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    model = options.model.resolve()
    with tempfile.TemporaryDirectory() as cache:
        cold, warm = (
            start(model, Path(cache), kind, options.device, options.pp, options.tp)
            for kind in ("cold", "warm")
        )
    for phase in cold.startup_s:
        print(f"{phase:<28} {cold.startup_s[phase]:8.3f} {warm.startup_s[phase]:8.3f} s")
    print(f"{'files compiled':<28} {cold.compiled_files:8d} {warm.compiled_files:8d}")
    if options.out is not None:
        options.out.write_text(json.dumps([asdict(cold), asdict(warm)], indent=1) + "\n")


if __name__ == "__main__":
    main()

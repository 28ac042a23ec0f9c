"""Measures LoRA adapters: `python -m benchmarks.lora --model DIR [--out FILE]`.

Products: microseconds that adapters add per merged matrix, in a graph of all layers, after the base
model's product. Serving: decode_bs64 with dummy weights and random adapters, assigned to rows
round-robin, compared with the same group without adapters. Target: 0.85 of its rate.
"""

import argparse
import json
import tempfile
from dataclasses import asdict, dataclass
from pathlib import Path

import torch
import triton.testing
from safetensors.torch import save_file

from benchmarks import workloads
from benchmarks.e2e import OPTIONS, bench
from benchmarks.floors import ModelShape
from worker_client.launcher import LocalDaemons
from worker_daemon.contracts.layer_ops import AdapterWeights
from worker_daemon.kernels.ops import TritonOps

DTYPE = torch.bfloat16
WORKLOAD = "decode_bs64"


@dataclass(frozen=True)
class Figure:
    """One figure."""

    name: str
    value: float
    unit: str


def modules_of(shape: ModelShape) -> dict[str, tuple[int, int]]:
    """Return each linear layer's (output features, input features)."""
    hidden, inner = shape.hidden_size, shape.intermediate_size
    q, kv = shape.num_heads * shape.head_dim, shape.num_kv_heads * shape.head_dim
    return {
        "self_attn.q_proj": (q, hidden),
        "self_attn.k_proj": (kv, hidden),
        "self_attn.v_proj": (kv, hidden),
        "self_attn.o_proj": (hidden, q),
        "mlp.gate_proj": (inner, hidden),
        "mlp.up_proj": (inner, hidden),
        "mlp.down_proj": (hidden, inner),
    }


def merged_of(shape: ModelShape) -> dict[str, tuple[tuple[int, ...], int]]:
    """Return each merged matrix's output features by part, and its input features."""
    own = modules_of(shape)
    q, k, v, o, gate, up, down = own.values()
    return {
        "qkv": ((q[0], k[0], v[0]), q[1]),
        "o": ((o[0],), o[1]),
        "gate_up": ((gate[0], up[0]), gate[1]),
        "down": ((down[0],), down[1]),
    }


def time_products(
    shape: ModelShape, name: str, num_rows: int, num_slots: int, rank: int
) -> list[Figure]:
    """Time a matrix's product alone and with adapters, in graphs of the model's layers, each with
    separate memory."""
    outputs, num_inputs = merged_of(shape)[name]
    ops = TritonOps(torch.device("cuda"))
    layers = min(shape.num_layers, 24)
    x = torch.randn(num_rows, num_inputs, device="cuda").to(DTYPE)
    num_outputs, num_ranks = sum(outputs), len(outputs) * rank
    weight = torch.randn(layers, num_outputs, num_inputs, device="cuda", dtype=DTYPE) / 64
    ends = tuple(sum(outputs[: index + 1]) for index in range(len(outputs)))
    a_size = num_ranks * num_inputs
    slots = torch.randn(layers, num_slots, a_size + num_outputs * rank, device="cuda", dtype=DTYPE)
    slots /= 64
    token_slots = 1 + torch.arange(num_rows, dtype=torch.int32, device="cuda") % num_slots
    adapters = [
        AdapterWeights(
            each[:, :a_size].view(num_slots, num_ranks, num_inputs),
            each[:, a_size:].view(num_slots, num_outputs, rank),
            ends,
        )
        for each in slots
    ]

    def alone() -> None:
        for layer in range(layers):
            ops.linear(x, weight[layer], None)

    def adapted() -> None:
        for layer in range(layers):
            y = ops.linear(x, weight[layer], None)
            ops.add_adapters(y, x, adapters[layer], token_slots)

    times = [
        1e3 * triton.testing.do_bench_cudagraph(run, rep=50) / layers for run in (alone, adapted)
    ]
    return [
        Figure(f"{name} alone", times[0], "us"),
        Figure(f"{name} adapters", times[1] - times[0], "us"),
    ]


def write_adapters(root: Path, shape: ModelShape, count: int, rank: int) -> list[str]:
    """Write random adapters of all linear layers; return their names."""
    names = [f"adapter-{index}" for index in range(count)]
    config = {"peft_type": "LORA", "r": rank, "lora_alpha": rank, "bias": "none"}
    modules = modules_of(shape)
    config["target_modules"] = sorted(name.rpartition(".")[2] for name in modules)
    for name in names:
        tensors = {}
        for layer in range(shape.num_layers):
            for module, (outputs, inputs) in modules.items():
                prefix = f"base_model.model.model.layers.{layer}.{module}"
                a = torch.randn(rank, inputs) / inputs**0.5
                tensors[f"{prefix}.lora_A.weight"] = a.to(DTYPE)
                tensors[f"{prefix}.lora_B.weight"] = (0.01 * torch.randn(outputs, rank)).to(DTYPE)
        (root / name).mkdir()
        (root / name / "adapter_config.json").write_text(json.dumps(config))
        save_file(tensors, root / name / "adapter_model.safetensors")
    return names


def serve(model: Path, shape: ModelShape, count: int, rank: int) -> list[Figure]:
    """Return the rates of the workload without and with adapters, in one group."""
    figures = []
    with tempfile.TemporaryDirectory() as scratch:
        root = Path(scratch)
        names = write_adapters(root, shape, count, rank)
        lines = list(workloads.json_lines(workloads.make(WORKLOAD, shape.vocab_size)))
        adapted = [
            json.dumps(json.loads(line) | {"lora": names[index % count]}) + "\n"
            for index, line in enumerate(lines)
        ]
        room = [*OPTIONS, "--max-loras", str(count), "--max-lora-rank", str(rank)]
        with LocalDaemons(["cuda:0"], model.parent, lora_root=root) as daemons:
            for name, own in (("base", lines), ("adapters", adapted)):
                requests = root / f"{name}.jsonl"
                requests.write_text("".join(own))
                bench(model, daemons.endpoints, requests, room)  # a discarded first pass
                result = bench(model, daemons.endpoints, requests, room)
                figures.append(Figure(f"{WORKLOAD} {name}", result["out_tok_s"], "token/s"))
    figures.append(Figure("share of the base rate", figures[1].value / figures[0].value, ""))
    return figures


def main() -> None:
    """Measure and print; with --out write a list of figures."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", type=Path, required=True)
    parser.add_argument("--rows", type=int, default=64)
    parser.add_argument("--adapters", type=int, default=8)
    parser.add_argument("--rank", type=int, default=16)
    parser.add_argument("--kernels-only", action="store_true")
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    shape = ModelShape.read(options.model)
    figures = []
    for name in merged_of(shape):
        figures += time_products(shape, name, options.rows, options.adapters, options.rank)
    if not options.kernels_only:
        figures += serve(options.model.resolve(), shape, options.adapters, options.rank)
    for figure in figures:
        print(f"{figure.name:<28} {figure.value:>12.3f} {figure.unit}", flush=True)
    if options.out is not None:
        options.out.write_text(json.dumps([asdict(each) for each in figures], indent=1) + "\n")


if __name__ == "__main__":
    main()

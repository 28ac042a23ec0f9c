"""Measures LoRA adapters: `python -m benchmarks.lora --model DIR [--out FILE]`.

Products: microseconds that adapters add per merged matrix (with the gate behind gate and up), in a
graph of all layers, and their sum. Results are compared with fp64 first. The floor is the time to
read A and B of all slots. Serving: decode_bs64 with dummy weights and random adapters, assigned to
rows round-robin, compared with the same group without adapters. Target: 0.85 of its rate.

With --dry-run, tiny products run once each on the CPU, for which TRITON_INTERPRET=1 must be set.
"""

import argparse
import json
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, NamedTuple

import torch
import triton.testing
from safetensors.torch import save_file

from benchmarks import workloads
from benchmarks.e2e import OPTIONS, bench
from benchmarks.floors import ModelShape
from benchmarks.paged_reference import relative_error
from worker_client.launcher import LocalDaemons
from worker_daemon.contracts.layer_ops import AdapterWeights
from worker_daemon.kernels.activation import act_and_mul
from worker_daemon.kernels.adapted_linear import AdaptedLinear
from worker_daemon.kernels.launch import has_dependent_launch
from worker_daemon.kernels.linear import ThinLinear
from worker_daemon.kernels.tuning import MatrixTile, Tuning, load_tuning

DTYPE = torch.bfloat16
MAX_ERROR = 1e-2
READ_BYTES_PER_S = 4.5e12
TUNED = "NVIDIA H200"
"""Whose tiles are used on devices that have none."""
MOST_LAYERS = 24
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


class Setting(NamedTuple):
    """What the products are measured with."""

    shape: ModelShape
    device: torch.device
    dtype: torch.dtype
    tuning: Tuning
    num_rows: int
    num_slots: int
    rank: int
    num_layers: int


class Products(NamedTuple):
    """The operands of one merged matrix in all layers, each with separate memory."""

    x: torch.Tensor
    weights: torch.Tensor
    """[layers, M, K]"""
    adapters: list[AdapterWeights]
    token_slots: torch.Tensor

    @property
    def adapter_bytes(self) -> int:
        """Bytes of A and B of one layer."""
        return sum(each.numel() * each.itemsize for each in self.adapters[0][:2])


def draw_products(setting: Setting, name: str) -> Products:
    """Draw random operands; rows have the slots' adapters in turn."""
    outputs, num_inputs = merged_of(setting.shape)[name]
    layers, num_slots, rank = setting.num_layers, setting.num_slots, setting.rank
    options: dict[str, Any] = {"device": setting.device, "dtype": setting.dtype}
    num_outputs, num_ranks = sum(outputs), len(outputs) * rank
    ends = tuple(sum(outputs[: index + 1]) for index in range(len(outputs)))
    a_size = num_ranks * num_inputs
    weights = torch.randn(layers, num_outputs, num_inputs, **options)
    weights /= num_inputs**0.5
    slots = torch.randn(layers, num_slots, a_size + num_outputs * rank, **options)
    slots[:, :, :a_size] /= num_inputs**0.5
    slots[:, :, a_size:] /= rank**0.5
    rows = torch.arange(setting.num_rows, dtype=torch.int32, device=setting.device)
    adapters = [
        AdapterWeights(
            each[:, :a_size].view(num_slots, num_ranks, num_inputs),
            each[:, a_size:].view(num_slots, num_outputs, rank),
            ends,
        )
        for each in slots
    ]
    x = torch.randn(setting.num_rows, num_inputs, **options)
    return Products(x, weights, adapters, 1 + rows % num_slots)


def is_gated(name: str) -> bool:
    """Return True for the matrix whose product is gated."""
    return name == "gate_up"


def expected_of(products: Products, gated: bool) -> torch.Tensor:
    """Return the result of the first layer in fp64."""
    x, (a, b, ends) = products.x.double(), products.adapters[0]
    rank, own = b.shape[2], products.token_slots.long() - 1
    row = torch.arange(len(x), device=x.device)
    shrunk = torch.einsum("nk,lrk->lnr", x, a.double())[own, row]
    added = []
    for index, (start, end) in enumerate(zip((0, *ends), ends, strict=False)):
        part = shrunk[:, index * rank : (index + 1) * rank]
        every = torch.einsum("nr,lor->lno", part, b[:, start:end].double())
        added.append(every[own, row])
    y = x @ products.weights[0].double().T + torch.cat(added, dim=1)
    if not gated:
        return y
    gate, up = y.chunk(2, dim=1)
    return torch.nn.functional.silu(gate) * up


def time_us(run: Callable[[], None], device: torch.device) -> float:
    """Return the median time of a call in a CUDA graph; on the CPU, that of one call."""
    if device.type == "cuda":
        return 1e3 * float(triton.testing.do_bench_cudagraph(run, rep=50, return_mode="median"))
    start = time.perf_counter()
    run()
    return 1e6 * (time.perf_counter() - start)


def time_products(setting: Setting, name: str) -> list[Figure]:
    """Time a matrix's product alone, and what adapters add to it, per layer."""
    products = draw_products(setting, name)
    thin = ThinLinear(setting.device, setting.tuning)
    adapted = AdaptedLinear(setting.device, thin)
    gated = is_gated(name)
    layers = range(setting.num_layers)
    pdl = has_dependent_launch(setting.device)

    def alone() -> None:
        for layer in layers:
            y = thin.linear(products.x, products.weights[layer])
            if gated:
                act_and_mul(y, "silu", pdl=pdl)

    def compute(layer: int) -> torch.Tensor:
        x, weights, adapters, token_slots = products
        inputs = (x, weights[layer], None, adapters[layer], token_slots)
        y = adapted.linear(*inputs)
        return act_and_mul(y, "silu", pdl=pdl) if gated else y

    def run() -> None:
        for layer in layers:
            compute(layer)

    error = relative_error(compute(0), expected_of(products, gated))
    if not error < MAX_ERROR:
        raise SystemExit(f"{name}: relative error {error:.2e}")
    base_us = time_us(alone, setting.device) / len(layers)
    us = time_us(run, setting.device) / len(layers)
    return [
        Figure(f"{name} alone", base_us, "us"),
        Figure(f"{name} adapters", us - base_us, "us"),
        Figure(f"{name} floor", products.adapter_bytes / READ_BYTES_PER_S * 1e6, "us"),
    ]


def time_layer(setting: Setting) -> list[Figure]:
    """Time all matrices; the last figures are the sums of a layer."""
    names = list(merged_of(setting.shape))
    figures = [figure for name in names for figure in time_products(setting, name)]
    by_name = {figure.name: figure.value for figure in figures}
    return figures + [
        Figure(f"layer {column}", sum(by_name[f"{name} {column}"] for name in names), "us")
        for column in ("alone", "adapters", "floor")
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


def tuning_of(device: torch.device) -> Tuning:
    """Return the tiles of the base model's products on a device."""
    name = torch.cuda.get_device_name(device)
    tuning = load_tuning(name)
    print(f"device: {name}; tiles: {name if tuning.tiles else TUNED}", flush=True)
    return tuning if tuning.tiles else load_tuning(TUNED)


def setting_of(shape: ModelShape, options: argparse.Namespace) -> Setting:
    """Return what a GPU's products are measured with."""
    device = torch.device("cuda")
    layers = min(shape.num_layers, MOST_LAYERS)
    sizes = (options.rows, options.adapters, options.rank, layers)
    return Setting(shape, device, DTYPE, tuning_of(device), *sizes)


def dry_setting() -> Setting:
    """Return a tiny setting for the CPU, in fp16: Triton's interpreter multiplies bf16 wrongly."""
    shape = ModelShape(64, 2, 4, 2, 16, 96, 128)
    tile = MatrixTile(32, 32, num_splits=2, num_warps=4, num_stages=2, prefetch=0)
    sizes = [(sum(outputs), inputs) for outputs, inputs in merged_of(shape).values()]
    tuning = Tuning({(*size, 16): tile for size in sizes})
    return Setting(shape, torch.device("cpu"), torch.float16, tuning, 9, 3, 8, 1)


def main(arguments: Sequence[str] | None = None) -> None:
    """Measure and print; with --out write a list of figures."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", type=Path, required=True)
    parser.add_argument("--rows", type=int, default=64)
    parser.add_argument("--adapters", type=int, default=8)
    parser.add_argument("--rank", type=int, default=16)
    parser.add_argument("--kernels-only", action="store_true")
    parser.add_argument("--dry-run", action="store_true")
    parser.add_argument("--out", type=Path)
    options = parser.parse_args(arguments)
    shape = ModelShape.read(options.model)
    setting = dry_setting() if options.dry_run else setting_of(shape, options)
    figures = time_layer(setting)
    if not (options.kernels_only or options.dry_run):
        figures += serve(options.model.resolve(), shape, options.adapters, options.rank)
    for figure in figures:
        print(f"{figure.name:<28} {figure.value:>12.3f} {figure.unit}", flush=True)
    if options.out is not None:
        options.out.write_text(json.dumps([asdict(each) for each in figures], indent=1) + "\n")


if __name__ == "__main__":
    main()

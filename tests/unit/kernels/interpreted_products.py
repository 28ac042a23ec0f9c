"""The kernels that a GPU would launch for a product, by its source, the format of its matrix and
its adapters, at sizes of an 8B model on an H200; conftest.py runs it. No kernel runs, and no tensor
has memory."""

from typing import Any

import pytest
import torch

from worker_daemon.contracts.layer_ops import GateUp, Norm, NormedSum
from worker_daemon.distributed.tp import SingleRank
from worker_daemon.kernels import compile_ahead, linear, tuning
from worker_daemon.kernels.ops import TritonOps
from worker_daemon.layers.adapters import AdapterLayout
from worker_daemon.layers.linear_method import LinearMethod
from worker_daemon.layers.parameter import Piece
from worker_daemon.layers.quantization import Int4Quantization, Quantization, WeightQuantization
from worker_daemon.layers.setup import LayerSetup

META = torch.device("meta")
HIDDEN, INNER = 4096, 14336
FORMATS: dict[str, Quantization | None] = {
    "plain": None,
    "fp8": WeightQuantization("channel", "dynamic"),
    "fp8 blocks": WeightQuantization("block", "dynamic"),
    "int4": Int4Quantization("gptq", 128, has_zeros=True, has_order=False),
}
NAMES = {
    "_row_kernel": "row",
    "_int4_row_kernel": "row",
    "_matrix_kernel": "matrix",
    "_fp8_kernel": "matrix",
    "_int4_kernel": "matrix",
    "_rms_norm_kernel": "norm",
    "_act_and_mul_kernel": "gate",
    "_fused_kernel": "to fp8",
    "_adapter_kernel": "adapter",
    "_product_kernel": "matrix and shrink",
    "_expand_kernel": "expand",
}


@pytest.fixture
def launched(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The names of all kernels launched."""
    names: list[str] = []

    def launcher(self: compile_ahead.Launched, grid: object) -> Any:
        name = self.kernel.__name__
        return lambda *arguments, **options: names.append(NAMES[name])

    monkeypatch.setattr(compile_ahead.Launched, "__getitem__", launcher)
    monkeypatch.setattr(linear, "load_tuning", lambda name: tuning.load_tuning("NVIDIA H200"))
    return names


def make_methods(
    quantization: Quantization | None, adapters: AdapterLayout | None
) -> tuple[LinearMethod, LinearMethod]:
    """Gate and up as one matrix, and down."""
    setup = LayerSetup(
        HIDDEN, SingleRank(), torch.bfloat16, META, TritonOps(META), adapters, quantization
    )
    methods = []
    for name, shape in (("gate_up", (2 * INNER, HIDDEN)), ("down", (HIDDEN, INNER))):
        whole = tuple(slice(0, size) for size in shape)
        piece = Piece(f"{name}.weight", shape, whole, whole)
        methods.append(setup.linear_method(name, shape, (piece,), None))
    gate_up, down = methods
    return gate_up, down


def launches(
    launched: list[str], methods: tuple[LinearMethod, LinearMethod], num_rows: int
) -> dict[str, list[str]]:
    gate_up, down = methods
    x, residual, gates = (
        torch.empty(num_rows, size, dtype=torch.bfloat16, device=META)
        for size in (HIDDEN, HIDDEN, 2 * INNER)
    )
    source = NormedSum(x, residual, Norm(x[0], 1e-5))
    products = {
        "rows": lambda: gate_up.project(x),
        "norm": lambda: gate_up.project(source),
        "gated": lambda: gate_up.project_gated(x, "silu"),
        "norm, gated": lambda: gate_up.project_gated(source, "silu"),
        "of a gate": lambda: down.forward(GateUp(gates, "silu")),
    }
    found = {}
    for name, product in products.items():
        launched.clear()
        product()
        found[name] = list(launched)
    return found


def check(
    launched: list[str], name: str, adapters: str, num_rows: int, expected: dict[str, list[str]]
) -> None:
    """adapters: the stage has "no" adapters, "idle" ones that no row uses, or "used" ones."""
    layout = None if adapters == "no" else AdapterLayout(4, 16)
    methods = make_methods(FORMATS[name], layout)
    if layout is not None:
        layout.bind(torch.empty(4, layout.slot_size, dtype=torch.bfloat16, device=META))
        if adapters == "used":
            layout.token_slots = torch.empty(num_rows, dtype=torch.int32, device=META)
    assert launches(launched, methods, num_rows) == expected


@pytest.mark.parametrize(
    ("name", "adapters", "num_rows", "product"),
    [
        *((name, "idle", 1, "row") for name in ("fp8", "fp8 blocks")),
        *((name, "idle", 9, "to fp8, matrix") for name in ("fp8", "fp8 blocks")),
        *((name, "used", 1, "row, adapter") for name in FORMATS),
        *((name, "used", 9, "to fp8, matrix, adapter") for name in ("fp8", "fp8 blocks")),
        *(("int4", adapters, 1, "row") for adapters in ("no", "idle")),
        *(("int4", adapters, 9, "matrix") for adapters in ("no", "idle")),
        ("int4", "used", 9, "matrix, adapter"),
        *(("plain", adapters, 9, "matrix") for adapters in ("no", "idle")),
        ("plain", "used", 9, "matrix and shrink, expand"),
    ],
)
def test_norm_product_and_gate_are_launches_of_their_own(
    launched: list[str], name: str, adapters: str, num_rows: int, product: str
) -> None:
    own = product.split(", ")
    expected = {
        "rows": own,
        "norm": ["norm", *own],
        "gated": [*own, "gate"],
        "norm, gated": ["norm", *own, "gate"],
        "of a gate": ["gate", *own],
    }
    check(launched, name, adapters, num_rows, expected)


@pytest.mark.parametrize("adapters", ["no", "idle"])
def test_one_row_is_one_launch(launched: list[str], adapters: str) -> None:
    expected = {each: ["row"] for each in ("rows", "norm", "gated", "norm, gated")}
    check(launched, "plain", adapters, 1, expected | {"of a gate": ["gate", "row"]})


@pytest.mark.parametrize("name", ["fp8", "fp8 blocks"])
def test_norms_and_gates_are_fused_with_the_conversion_to_fp8(
    launched: list[str], name: str
) -> None:
    """A matrix of so many rows gets its norm of one row apart."""
    one = {each: ["row"] for each in ("rows", "norm", "gated")}
    of_gate = ["to fp8", "matrix"]
    check(launched, name, "no", 1, one | {"norm, gated": ["norm", "row"], "of a gate": of_gate})
    sources = ("rows", "norm", "gated", "norm, gated", "of a gate")
    check(launched, name, "no", 9, dict.fromkeys(sources, of_gate))

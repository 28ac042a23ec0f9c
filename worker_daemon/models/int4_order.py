"""Reads the order of a 4-bit checkpoint's columns, before its values: those quantized in the order
of activations (act-order) list the group of each column."""

from collections.abc import Iterable, Sequence
from pathlib import Path

import torch
from torch import Tensor

from rpc_schema.errors import CheckpointError
from worker_daemon.layers.int4 import Int4Values
from worker_daemon.layers.int4_formats import PACKINGS, module_of
from worker_daemon.layers.parameter import Parameter
from worker_daemon.models.weights import WriteObserver, read_headers, read_tensor, tensor_names

_FIX = "use the unquantized checkpoint, or quantize it again"


def reset_orders(parameters: Iterable[Parameter]) -> None:
    """Set the columns of all matrices to their natural order."""
    for values in _matrices(parameters):
        if values.order is not None:
            values.order.data.copy_(torch.arange(values.order.data.shape[0]))


def load_orders(
    parameters: Iterable[Parameter], model_dir: Path, observer: WriteObserver | None = None
) -> frozenset[str]:
    """Set the order of each matrix's columns from a checkpoint. Return the names of the tensors
    that describe matrices and are not loaded with them. observer: told of the matrices whose order
    changes, before any does.

    Raises:
        CheckpointError: a file is damaged, a tensor is missing, or groups have other sizes than
            config.json says; or the tensors of a merged matrix differ in order.
    """
    matrices = list(_matrices(parameters))
    if not matrices:
        return frozenset()
    held = tensor_names(model_dir)
    found = [(values, _read_order(values, held, model_dir)) for values in matrices]
    ordered = [(values.order, order) for values, order in found if values.order is not None]
    if observer is not None and ordered:
        moved = (piece.name for values, _ in found for piece in values.pieces)
        observer.writing(list(moved))
    for parameter, order in ordered:
        assert order is not None, "read where there is a parameter"
        parameter.data.copy_(order)
    packing = PACKINGS[matrices[0].quantization.form]
    suffixes = [*packing.unused, *([packing.group_index] if packing.group_index else [])]
    return frozenset(name for name in held if name.rpartition(".")[2] in suffixes)


def _matrices(parameters: Iterable[Parameter]) -> Iterable[Int4Values]:
    return (each for each in parameters if isinstance(each, Int4Values))


def _read_order(values: Int4Values, held: frozenset[str], model_dir: Path) -> Tensor | None:
    """Return the order of a matrix's columns; None if that is the natural one."""
    size, has_order = values.quantization.group_size, values.quantization.has_order
    suffix = PACKINGS[values.quantization.form].group_index
    if suffix is None or size is None:
        return None
    names = [f"{module_of(piece)}.{suffix}" for piece in values.held_pieces]
    if not has_order:
        names = [name for name in names if name in held]
    if not names:
        return None
    headers = read_headers(model_dir, names)
    orders = [_order(read_tensor(headers[name].path, name), size, name) for name in names]
    if any(not torch.equal(order, orders[0]) for order in orders):
        raise _refused(names, "these matrices are one product, but their columns differ in order")
    if not has_order and not torch.equal(orders[0], torch.arange(orders[0].numel())):
        raise _refused(names, "groups are not consecutive columns, though config.json says so")
    return orders[0]


def _order(groups: Tensor, size: int, name: str) -> Tensor:
    """Return the columns sorted by their group, int64 [K]."""
    counts = groups.new_zeros(0)
    if (
        groups.dim() == 1
        and groups.numel()
        and not groups.is_floating_point()
        and groups.min() >= 0
    ):
        counts = torch.bincount(groups) if groups.max() < groups.numel() else counts
    if counts.numel() * size != groups.numel() or not (counts == size).all():
        raise _refused([name], f"its groups are not each of {size} columns")
    return torch.argsort(groups, stable=True)


def _refused(names: Sequence[str], problem: str) -> CheckpointError:
    shown = ", ".join(names)
    return CheckpointError(f"{shown}: {problem}", field=names[0], value=None, fix=_FIX)

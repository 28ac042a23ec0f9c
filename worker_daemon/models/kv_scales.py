"""Reads the scales of a KV cache in FP8 from a checkpoint, under the names that quantizers use."""

from collections.abc import Sequence
from pathlib import Path

from torch import Tensor

from rpc_schema.errors import CheckpointError
from worker_daemon.layers.kv_scales import HeadScales
from worker_daemon.models.weights import read_headers, read_tensor, tensor_names
from worker_daemon.regular_file import broken_file

_KEY_NAMES = ("k_scale", "k_proj.k_scale", "qkv_proj.k_scale", "kv_scale")
_VALUE_NAMES = ("v_scale", "v_proj.v_scale", "qkv_proj.v_scale", "kv_scale")
"""Names below the attention's, the first that exists counts: compressed-tensors', ModelOpt's,
that of a merged projection, and that of one scale for keys and values."""
_SUFFIXES = tuple(f".{name}" for name in {*_KEY_NAMES, *_VALUE_NAMES})


def load_kv_scales(scales: Sequence[HeadScales], model_dir: Path) -> frozenset[str]:
    """Set the scales of a rank's layers from a checkpoint; those that it lacks to 1. Return the
    names of the scales of all layers. Each has one value for all heads of a layer, or one for each
    KV head.

    Raises:
        CheckpointError: a file is damaged, or a scale has another number of values, or one that is
            not above 0 and finite.
    """
    if not scales:
        return frozenset()
    held = tensor_names(model_dir)
    wanted: dict[str, list[tuple[HeadScales, Tensor]]] = {}
    for each in scales:
        each.reset()
        for row, names in zip(each.values, (_KEY_NAMES, _VALUE_NAMES), strict=True):
            full_names = (f"{each.prefix}.{name}" for name in names)
            name = next((name for name in full_names if name in held), None)
            if name is not None:
                wanted.setdefault(name, []).append((each, row))
    headers = read_headers(model_dir, wanted) if wanted else {}
    for name, header in headers.items():
        values = read_tensor(header.path, name).flatten().float()
        for each, row in wanted[name]:
            row.copy_(_of_heads(values, each, header.path, name))
    return frozenset(name for name in held if name.endswith(_SUFFIXES))


def _of_heads(values: Tensor, scales: HeadScales, path: Path, name: str) -> Tensor:
    """Return the scales of this rank's heads: [Hkv], or [1] for all of them."""
    if values.numel() not in (1, scales.total):
        problem = f"has {values.numel()} values of {name} for {scales.total} KV heads"
        raise broken_file(path, problem, f"one value, or {scales.total}")
    if not (values.isfinite() & (values > 0)).all():
        raise CheckpointError(
            f"{path} has a scale that is not above 0 and finite",
            field=name,
            value=values.tolist()[:8],
            fix="calibrate the KV cache again, or load with kv_cache_dtype auto",
        )
    return values if values.numel() == 1 else values[scales.heads]

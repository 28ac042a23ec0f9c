"""Computes Triton's hash of its own files, which every key of its kernel cache contains."""

from triton.runtime.cache import triton_key


def hash_triton() -> None:
    """Compute the hash; Triton remembers it. Does not load torch."""
    triton_key()

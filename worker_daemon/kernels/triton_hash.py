"""Computes Triton's hash of its own files, a part of the key of every kernel in its cache."""

from triton.runtime.cache import triton_key


def hash_triton() -> None:
    """Compute the hash, which Triton keeps. Does not load torch."""
    triton_key()

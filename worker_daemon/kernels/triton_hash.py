"""Computes Triton's hash of its own files, which every key of its kernel cache contains."""

from triton.runtime.cache import triton_key


def hash_triton() -> str:
    """Return the hash, which Triton keeps once it is computed. Does not load torch."""
    key: str = triton_key()
    return key

"""Triton kernels and their launchers, one operation per file.

Knows tensors and devices; no layer, model or wire type.
"""

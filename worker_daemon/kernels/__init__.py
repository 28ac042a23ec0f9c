"""Triton kernels and their launchers, one operation per file."""

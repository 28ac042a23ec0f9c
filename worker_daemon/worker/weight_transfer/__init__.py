"""Weights from outside into a running worker."""

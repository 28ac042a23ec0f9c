"""A driver's side of optional features: the interface (interface.py), their list (registry.py), and
one file for each feature."""

"""What optional features are to a driver: the interface (interface.py), which there are
(registry.py), and one file a feature."""

"""Optional features of a step: the interface (interface.py), a runner's parts together
(step_parts.py), the list of parts (registry.py), and one file per part."""

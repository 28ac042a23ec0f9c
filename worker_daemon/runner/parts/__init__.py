"""Optional features of a step: their interface (interface.py), all parts of a runner
(step_parts.py), the list of parts (registry.py), and one file per part."""

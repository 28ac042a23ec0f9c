"""Optional features of a step: the interface (interface.py), what holds a runner's parts together
(step_parts.py), which parts there are (registry.py), and one file a part."""

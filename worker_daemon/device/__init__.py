"""The device: what it is, and how its memory is spent. Knows no model and no message."""

"""KV connectors: blocks that leave the KV cache and come back. One object behind interface.py, or
none."""

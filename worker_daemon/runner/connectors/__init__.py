"""KV connectors: blocks that leave the KV cache and come back. One object behind interface.py, or
none.

host_tier.py    this rank's host memory; checksums.py: what is checked
peers.py        moves blocks between the host tiers of two groups; peer_routes.py: from whom to whom
"""

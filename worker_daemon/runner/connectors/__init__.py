"""KV connectors: blocks that leave the KV cache and come back. One object behind interface.py, or
none.

host_tier.py    this rank's host memory; checksums.py: what is checked; tier_index.py: what the next
                daemon takes over; block_identity.py: whose blocks they are
peers.py        moves blocks between the host tiers of two groups; peer_routes.py: from whom to whom
"""

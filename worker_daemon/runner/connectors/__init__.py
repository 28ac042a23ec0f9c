"""KV connectors: blocks that leave the KV cache and come back. Those of a step move together
(kv_connectors.py), each place behind interface.py.

host_tier.py    this rank's host memory; checksums.py: what is checked; tier_index.py: what the next
                daemon takes over; block_identity.py: whose blocks they are
files.py        files; file_traffic.py: what reads and writes them; block_files.py: their format
peers.py        moves blocks between the host tiers of two groups; peer_routes.py: from whom to whom
"""

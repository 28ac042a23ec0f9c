"""Ranks, links and what travels between daemons. Knows torch.distributed; knows no message and no
model."""

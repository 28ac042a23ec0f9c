"""Ranks, links and transfers between daemons, over torch.distributed."""

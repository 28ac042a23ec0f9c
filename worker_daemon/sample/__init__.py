"""Sampling: chooses tokens by a pure function of seed, position and logits."""

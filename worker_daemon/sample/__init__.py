"""Tokens from logits, as a pure function of seed, position and logits."""

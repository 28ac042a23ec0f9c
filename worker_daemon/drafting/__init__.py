"""Drafters: they guess the next tokens of a row, which its next step verifies (speculative
decoding)."""

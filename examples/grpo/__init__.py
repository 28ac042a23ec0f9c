"""A complete loop of GRPO (Shao et al., 2024) on CPUs, which goes on where it was after the death
of any of its processes: `python -m examples.grpo`. docs/rollouts.md explains it.

Generation is cut into segments. In each, every sample in flight gains SEGMENT_TOKENS tokens, all
of one policy; a sample lives for SPAN segments, and so has tokens of SPAN policies. A policy is
applied at the border of two segments, and nowhere else. What a border needs is in one file, so
whatever dies, generation goes on from the last border, with the same tokens as if nothing had
happened.
"""

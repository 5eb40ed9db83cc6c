"""Shapes of the short convolution, shared by tests and benchmarks.

Dims: B batch, T new tokens, C channels (any number of axes), W convolution width.
"""

LENGTHS = (1, 2, 3, 4, 33)
CHANNELS = (3, 10)
WIDTH = 4
SPEED_SHAPES = {"decode": (8, 1, (3, 3072)), "prefill": (1, 1024, (3, 3072))}  # B, T, C

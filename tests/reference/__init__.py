"""The slow twin of the whole: both model families in float64 NumPy, and seeded checkpoints to run them on.

Nothing here imports JAX or MaxText, so an error in the project cannot hide in its own oracle.
"""

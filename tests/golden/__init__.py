"""Outputs of other implementations, kept as arrays so that the default tests need none of them."""

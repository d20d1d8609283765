"""Tensor parallelism: layers divided among workers that compute them together."""

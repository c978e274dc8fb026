"""Attention for every position encoding, dense or block by block."""

from relpos_jax.attention.attend import attend

__all__ = ["attend"]

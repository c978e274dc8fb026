"""How transformers know where a token is: position encodings in JAX and Flax.

Positions are data (`relpos_jax.where`); encodings are frozen dataclasses of pure hooks
(`relpos_jax.positional`); one `attend` serves training, segment memory and cached
decoding (`relpos_jax.attention`). `docs/decisions.md` says why.
"""

__version__ = "0.1.0"

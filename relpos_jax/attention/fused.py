"""Attention by the platform's fused kernel, where that is exact.

A fused kernel knows scaled products and a causal band. So it fits encodings that act on
queries and keys alone, and rows that are one document each without empty slots: whether
they are is known when the program runs, and where they are not, blockwise attention
does the work. `jax.nn.dot_product_attention` finds the kernel: cuDNN's on NVIDIA GPUs,
in half precision (FlashAttention, Dao et al. 2022); elsewhere XLA's, which keeps all
pairs.
"""

from collections.abc import Callable

import jax
import jax.numpy as jnp

from relpos_jax.attention import core
from relpos_jax.attention.core import Operands
from relpos_jax.masks import Bidirectional, Causal, Mask, Window
from relpos_jax.positional.protocol import PositionEncoding
from relpos_jax.relative import Layout
from relpos_jax.where import Where


def why_not(
    encoding: PositionEncoding, mask: Mask, layout: Layout | None, queries, keys, drop
) -> str | None:
    """Returns why a fused kernel could not be exact, None where it can."""
    for hook in ("score", "value"):
        if core.overrides(encoding, hook):
            return f"{type(encoding).__name__} changes more than queries and keys"
    if type(mask) not in (Bidirectional, Causal, Window):
        return f"it has no kernel for {mask}"
    if layout is None or not layout.unit or layout.offset or queries != keys:
        return "queries must be all of the keys, in a layout of unit spacing: no memory"
    return None if drop is None else "it has no dropout on attention weights"


def attend_fused(
    mask: Mask,
    scale: float,
    operands: Operands,
    q_at: Where,
    k_at: Where,
    otherwise: Callable[[], jax.Array],
) -> jax.Array:
    """Returns `[b q h d]` float32.

    Args:
      mask, scale, q_at, k_at: as for the other paths, checked by `why_not`.
      operands: time first, `[b t h d]`, queries and keys as they are to be multiplied.
      otherwise: attends where a row holds several documents or empty slots.
    """
    q, k, v = operands.q, operands.k, operands.v

    def fused():
        window = None
        if isinstance(mask, Window):
            window = (mask.width - 1, 0 if mask.causal else mask.width - 1)
        found = jax.nn.dot_product_attention(
            q.astype(v.dtype),
            k.astype(v.dtype),
            v,
            scale=scale,
            is_causal=bool(mask.causal),
            local_window_size=window,
            implementation=kernel(mask, q.shape[-1], v.dtype),
        )
        return found.astype(jnp.float32)

    segments = jnp.concatenate([q_at.segment, k_at.segment], axis=1)
    alone = jnp.all((segments == segments[:, :1]) & (segments != 0))
    return jax.lax.cond(alone, fused, otherwise)


def kernel(mask: Mask, head_dim: int, dtype) -> str:
    """Returns the name of the kernel for `jax.nn.dot_product_attention`.

    cuDNN's has windows that look back only.
    """
    half = dtype in (jnp.bfloat16, jnp.float16)
    back = mask.causal or not isinstance(mask, Window)
    fits = half and back and head_dim % 8 == 0 and head_dim <= 128
    return "cudnn" if jax.default_backend() == "gpu" and fits else "xla"

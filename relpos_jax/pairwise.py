"""The products of attention between rows of queries and rows of keys.

They are matrix products for each leading index. The keys' side may lack the first axis,
the batch, if all of it meets the same rows. Its gradient sums over queries: a product
with its large operand transposed, for which XLA on CPU takes up to twice as long as for
the others. There the small operand is turned instead.
"""

import functools

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float


def scores(x: Float[Array, "b *h q d"], y: Float[Array, "*bh k d"]):
    """Returns `x_i . y_j` as `[b *h q k]`, added up in float32."""
    return _scores(x, _alone(x, y))


@jax.custom_vjp
def _scores(x, y):
    return _einsum("B...qd,H...kd->B...qk", x, y, x.ndim != y.ndim)


def sums(w: Float[Array, "b *h q k"], y: Float[Array, "*bh k d"]):
    """Returns `sum_j w_ij y_j` as `[b *h q d]`, added up in float32."""
    return _sums(w, _alone(w, y))


@jax.custom_vjp
def _sums(w, y):
    return _einsum("B...qk,H...kd->B...qd", w, y, w.ndim != y.ndim)


def received(
    w: Float[Array, "b *h q k"], x: Float[Array, "b *h q d"], shared: bool = False
):
    """Returns `sum_i w_ij x_i` as `[b *h k d]`, added up in float32.

    If `shared` it is summed over the batch too: `[*h k d]`.
    """
    return jax.lax.platform_dependent(
        w,
        x,
        cpu=functools.partial(_received_turned, shared),
        default=functools.partial(_received, shared),
    )


def _received(shared, w, x):
    return _einsum("B...qk,B...qd->H...kd", w, x, shared)


def _received_turned(shared, w, x):
    # The barrier keeps the compiler from turning it back.
    out = _einsum("B...qd,B...qk->H...dk", x, w, shared)
    return jax.lax.optimization_barrier(out).mT


def _alone(x, y):
    # A batch of one needs none of the copies that bring a batch behind the heads.
    return y[None] if x.ndim != y.ndim and x.shape[0] == 1 else y


def _einsum(spec: str, x, y, shared: bool):
    # B stands for the batch, H for it or, where it is shared, for nothing.
    spec = spec.replace("B", "b").replace("H", "" if shared else "b")
    return jnp.einsum(spec, x, y, preferred_element_type=jnp.float32)


def _scores_backward(saved, d_out):
    x, y = saved
    d_x, d_y = sums(d_out, y), received(d_out, x, x.ndim != y.ndim)
    return d_x.astype(x.dtype), d_y.astype(y.dtype)


def _sums_backward(saved, d_out):
    w, y = saved
    d_w, d_y = scores(d_out, y), received(w, d_out, w.ndim != y.ndim)
    return d_w.astype(w.dtype), d_y.astype(y.dtype)


_scores.defvjp(lambda x, y: (_scores(x, y), (x, y)), _scores_backward)
_sums.defvjp(lambda w, y: (_sums(w, y), (w, y)), _sums_backward)

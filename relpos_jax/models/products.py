"""Products with a layer's weights, whose gradient takes no transposed copies."""

import functools

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float


def product(
    x: Float[Array, "..."],
    kernel: Float[Array, "..."],
    dimension_numbers: tuple,
    precision=None,
    preferred_element_type=None,
    out_sharding=None,
) -> Float[Array, "..."]:
    """Returns what `jax.lax.dot_general` does, for NNX's `dot_general=`.

    `x`'s last axes meet the kernel's first ones. JAX derives the kernel's gradient as
    the transpose of a product, which XLA on CPU makes from a transposed copy of the
    output's gradient: a fifth of the processor time of a feed-forward layer, forward
    and backward. Here it is a product in the kernel's own order. As with any
    `custom_vjp`, there is no forward-mode derivative.

    Raises:
      ValueError: other dimension numbers, or an explicit sharding.
    """
    (x_axes, kernel_axes), batch = dimension_numbers
    inner = len(kernel_axes)
    wanted = tuple(range(x.ndim - inner, x.ndim)), tuple(range(inner))
    given = tuple(axis % x.ndim for axis in x_axes), tuple(kernel_axes)
    if given != wanted or any(batch):
        raise ValueError(
            f"the last axes of {x.shape} must meet the first of {kernel.shape} in "
            f"order, but the dimension numbers are {dimension_numbers}"
        )
    if out_sharding is not None:
        raise ValueError("layers leave shardings to the compiler: no out_sharding")
    return _product(inner, precision, preferred_element_type, x, kernel)


@functools.partial(jax.custom_vjp, nondiff_argnums=(0, 1, 2))
def _product(inner, precision, kind, x, kernel):
    axes = tuple(range(x.ndim - inner, x.ndim)), tuple(range(inner))
    return _dot(x, kernel, axes, precision, kind)


def _forward(inner, precision, kind, x, kernel):
    return _product(inner, precision, kind, x, kernel), (x, kernel)


def _backward(inner, precision, kind, saved, d_out):
    x, kernel = saved
    rows = x.ndim - inner
    out = tuple(range(rows, d_out.ndim)), tuple(range(inner, kernel.ndim))
    d_x = _dot(d_out, kernel, out, precision, None)
    d_kernel = _kernel(x, d_out, rows, precision)
    return d_x.astype(x.dtype), d_kernel.astype(kernel.dtype)


def _kernel(x, d_out, rows, precision):
    """Returns the kernel's gradient, summed over the first `rows` axes."""
    axes = tuple(range(rows)), tuple(range(rows))

    def plain(x, d_out):
        return _dot(x, d_out, axes, precision, None)

    def swapped(x, d_out):
        # The barrier keeps the compiler from swapping them back.
        found = jax.lax.optimization_barrier(_dot(d_out, x, axes, precision, None))
        outer = d_out.ndim - rows
        order = [*range(outer, found.ndim), *range(outer)]
        return jnp.transpose(found, order)

    # XLA on CPU turns the first operand round: let it be the smaller one.
    if x.size <= d_out.size:
        return plain(x, d_out)
    return jax.lax.platform_dependent(x, d_out, cpu=swapped, default=plain)


def _dot(x, y, axes, precision, kind):
    return jax.lax.dot_general(
        x, y, (axes, ((), ())), precision=precision, preferred_element_type=kind
    )


_product.defvjp(_forward, _backward)

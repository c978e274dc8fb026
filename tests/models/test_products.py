import jax
import jax.numpy as jnp
import numpy as np
import pytest

from relpos_jax.models.products import product

CASES = [
    ((2, 3, 4), (4, 5), (((2,), (0,)), ((), ()))),
    ((2, 3, 4), (4, 2, 3), (((2,), (0,)), ((), ()))),
    ((2, 3, 2, 2), (2, 2, 5), (((2, 3), (0, 1)), ((), ()))),
    ((5, 6), (6, 2), (((1,), (0,)), ((), ()))),  # wider in than out
    ((5, 3, 4), (3, 4, 2, 2), (((1, 2), (0, 1)), ((), ()))),
]


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("shape, weights, numbers", CASES)
def test_product_and_gradients_are_jax_s(shape, weights, numbers, dtype):
    keys = jax.random.split(jax.random.key(0))
    x = jax.random.normal(keys[0], shape, dtype)
    kernel = jax.random.normal(keys[1], weights, dtype)

    def loss(function):
        def run(x, kernel):
            return jnp.sum(jnp.sin(function(x, kernel, numbers).astype(jnp.float32)))

        return jax.jit(jax.value_and_grad(run, argnums=(0, 1)))(x, kernel)

    found, wanted = loss(product), loss(jax.lax.dot_general)
    tolerance = 1e-5 if dtype == "float32" else 2e-2
    for one, other in zip(*map(jax.tree.leaves, (found, wanted)), strict=True):
        assert one.dtype == other.dtype and one.shape == other.shape
        one, other = (np.asarray(x, np.float32) for x in (one, other))
        np.testing.assert_allclose(one, other, rtol=tolerance, atol=tolerance)


def test_other_products_are_refused():
    x, kernel = jnp.zeros((2, 3)), jnp.zeros((3, 2))
    with pytest.raises(ValueError, match="last axes"):
        product(x, kernel, (((0,), (1,)), ((), ())))

"""Products of attention against the plain formula, and their gradients."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from relpos_jax import pairwise

BATCH, HEADS, QUERIES, KEYS, WIDTH = 3, 2, 5, 7, 4


def normal(seed, *shape):
    return jax.random.normal(jax.random.key(seed), shape)


def gradients(function, *inputs):
    def loss(*inputs):
        return jnp.sum(jnp.sin(function(*inputs)))

    return jax.jit(jax.grad(loss, argnums=(0, 1)))(*inputs)


@pytest.mark.parametrize("batch", [1, BATCH])
@pytest.mark.parametrize("shared", [False, True], ids=["own", "shared"])
@pytest.mark.parametrize(
    "function, width, formula",
    [
        (pairwise.scores, WIDTH, "bhqd,{}->bhqk"),
        (pairwise.sums, KEYS, "bhqk,{}->bhqd"),
    ],
)
def test_a_product_and_its_gradients(function, width, formula, shared, batch):
    x = normal(0, batch, HEADS, QUERIES, width)
    y = normal(1, *(() if shared else (batch,)), HEADS, KEYS, WIDTH)
    formula = formula.format("hkd" if shared else "bhkd")

    def plain(x, y):
        return jnp.einsum(formula, x, y, precision="highest")

    np.testing.assert_allclose(function(x, y), plain(x, y), rtol=1e-5, atol=1e-5)
    found, wanted = gradients(function, x, y), gradients(plain, x, y)
    for one, other in zip(found, wanted, strict=True):
        np.testing.assert_allclose(one, other, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("shared", [False, True], ids=["own", "shared"])
def test_what_keys_receive_is_the_same_on_every_platform(shared):
    w = normal(0, BATCH, HEADS, QUERIES, KEYS)
    x = normal(1, BATCH, HEADS, QUERIES, WIDTH)
    plain = pairwise._received(shared, w, x)
    turned = pairwise._received_turned(shared, w, x)
    assert plain.shape == (*(() if shared else (BATCH,)), HEADS, KEYS, WIDTH)
    np.testing.assert_allclose(turned, plain, rtol=1e-5, atol=1e-5)


def test_half_precision_is_added_up_in_float32():
    x = jnp.full((1, 1, 1, 4096), 1.0, jnp.bfloat16)
    assert pairwise.scores(x, x)[0, 0, 0, 0] == 4096
    assert pairwise.sums(x, x.mT)[0, 0, 0, 0] == 4096
    found = jax.grad(lambda x, y: pairwise.scores(x, y).sum(), argnums=(0, 1))(x, x)
    assert {one.dtype for one in found} == {jnp.dtype("bfloat16")}

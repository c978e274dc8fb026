"""Dropout on attention weights: the same ones dense and by blocks, none kept."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from relpos_jax import positional, where
from relpos_jax.attention import attend
from relpos_jax.attention.dropout import dropped, kept
from relpos_jax.positional import merge
from relpos_jax.positional.protocol import Dims
from relpos_jax.relative import Layout

KEY = jax.random.key(3)


def test_a_part_of_the_weights_is_dropped_each_by_its_place():
    mask = np.asarray(kept(dropped(KEY, 0.2), (3, 4, 50, 60)))
    assert set(np.unique(mask)) == {0.0, np.float32(1 / (1 - np.float32(0.2)))}
    # 36,000 draws: the mean of a thousandth of their deviation is 0.0026.
    assert abs(mask.mean() - 1) < 0.015
    flat = mask.reshape(12, -1) > 0
    alike = (flat[:, None] == flat[None]).mean(-1)[~np.eye(12, dtype=bool)]
    assert np.all(abs(alike - (0.8**2 + 0.2**2)) < 0.05)  # heads and rows differ
    block = kept(dropped(KEY, 0.2), (3, 4, 8, 16), jnp.int32(10), jnp.int32(30))
    np.testing.assert_array_equal(block, mask[:, :, 10:18, 30:46])
    other = kept(dropped(jax.random.key(4), 0.2), (3, 4, 50, 60))
    assert not np.array_equal(other, mask)


@pytest.mark.parametrize("name", ["none", "transformer_xl", "shaw"])
def test_dense_and_blockwise_drop_the_same_with_the_same_gradients(name):
    encoding, dims = positional.make(name), Dims(2, 4, 8)
    keys = iter(jax.random.split(jax.random.key(0), 6))
    params = merge(
        encoding.init(next(keys), dims), encoding.init_shared(next(keys), dims)
    )
    q = jax.random.normal(next(keys), (2, 11, 2, 4))
    k, v = (jax.random.normal(next(keys), (2, 19, 2, 4)) for _ in range(2))
    at = where.contiguous(2, 19)
    q_at = jax.tree.map(lambda x: x[:, 8:], at)

    @functools.partial(jax.jit, static_argnums=1)
    def run(inputs, implementation):
        def loss(inputs):
            params, q, k, v = inputs
            out = attend(
                encoding,
                params,
                q,
                k,
                v,
                q_at,
                at,
                layout=Layout(offset=8, unit=True),
                implementation=implementation,
                blocks=(8, 8) if implementation == "blockwise" else None,
                dropout=0.3,
                key=KEY,
            )
            return jnp.sum(jnp.sin(out)), out

        return jax.grad(loss, has_aux=True)(inputs)

    inputs = params, q, k, v
    found, wanted = (run(inputs, kind) for kind in ("blockwise", "dense"))
    for x, y in zip(jax.tree.leaves(found), jax.tree.leaves(wanted), strict=True):
        np.testing.assert_allclose(x, y, rtol=1e-4, atol=1e-5)
    if name == "none":
        logits = jnp.einsum("bqhd,bkhd->bhqk", q, k) / 2
        sees = jnp.arange(19)[None] <= jnp.arange(8, 19)[:, None]
        weights = jax.nn.softmax(jnp.where(sees[None, None], logits, -jnp.inf))
        weights *= kept(dropped(KEY, 0.3), weights.shape)
        out = jnp.einsum("bhqk,bkhd->bqhd", weights, v)
        np.testing.assert_allclose(wanted[1], out, rtol=1e-5, atol=1e-6)


def test_a_ring_refuses_and_a_rate_of_one_too():
    q = jnp.zeros((1, 2, 1, 2))
    at = where.contiguous(1, 2)
    attend_none = functools.partial(
        attend, positional.make("none"), {}, q, q, q, at, at, key=KEY
    )
    with pytest.raises(ValueError, match="ring has no dropout"):
        attend_none(dropout=0.1, implementation="ring")
    with pytest.raises(ValueError, match=r"in \[0, 1\), got 1"):
        attend_none(dropout=1.0)

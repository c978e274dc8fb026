"""DAPE (Zheng et al. 2024)."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from relpos_jax import where
from relpos_jax.attention import attend
from relpos_jax.masks import Bidirectional
from relpos_jax.positional import Dims, make, merge
from relpos_jax.positional.dape import Dape, adapt
from relpos_jax.positional.t5 import T5

HEADS, T = 2, 5
DIMS = Dims(HEADS, 4, 8)


def inputs():
    parts = jax.random.split(jax.random.key(0), 3)
    return [jax.random.normal(part, (1, T, HEADS, 4)) for part in parts]


def params_of(encoding):
    own = encoding.init(jax.random.key(1), DIMS)
    return merge(own, encoding.init_shared(jax.random.key(2), DIMS))


def test_equation():
    dape = make(
        "dape", inner={"name": "t5", "buckets": 8, "max_distance": 10}, hidden=3
    )
    assert dape.inner == T5(buckets=8, max_distance=10)
    params = jax.tree.map(lambda x: x + 0.2, params_of(dape))
    q, k, v = inputs()
    at = where.contiguous(1, T)
    ours = attend(dape, params, q, k, v, at, at, mask=Bidirectional())[0]
    w = {name: np.asarray(x, np.float64) for name, x in params["mlp"].items()}
    distance = jnp.arange(T)[:, None] - jnp.arange(T)[None, :]
    bias = np.asarray(dape.inner.table(params["inner"], distance), np.float64)
    q, k, v = (np.asarray(x[0], np.float64) for x in (q, k, v))
    logits = np.zeros((HEADS, T, T))
    for i in range(T):
        for j in range(T):
            a = np.array([q[i, h] @ k[j, h] for h in range(HEADS)])  # T5: not scaled
            both = np.concatenate([a, bias[i, j]])
            hidden = both @ w["inner"] + w["inner_bias"]
            hidden = np.where(hidden > 0, hidden, 0.01 * hidden)
            logits[:, i, j] = a + bias[i, j] + hidden @ w["outer"] + w["outer_bias"]
    weights = np.exp(logits)
    weights /= weights.sum(axis=-1, keepdims=True)
    expected = np.einsum("hqk,khd->qhd", weights, v)
    np.testing.assert_allclose(ours, expected, atol=1e-4)


@pytest.mark.parametrize(
    "name", ["alibi", "kerple_log", "transformer_xl", "rope", "shaw"]
)
def test_without_its_mlp_it_is_the_inner_encoding(name):
    dape = make("dape", inner={"name": name})
    params = params_of(dape)
    params["mlp"] = jax.tree.map(jnp.zeros_like, params["mlp"])
    q, k, v = inputs()
    at = where.contiguous(1, T)
    ours = attend(dape, params, q, k, v, at, at)
    inner = attend(dape.inner, params.get("inner", {}), q, k, v, at, at)
    np.testing.assert_allclose(ours, inner, atol=1e-6)


def test_heads_hear_each_other():
    params = params_of(Dape())["mlp"]
    logits = jnp.zeros((1, HEADS, 1, 1))

    def second(x):
        changed = logits.at[0, 0].set(x)
        return adapt(params, changed, logits)[0, 1, 0, 0]

    assert abs(float(jax.grad(second)(1.0))) > 0


def test_parameters():
    dape = make("dape")
    dims = Dims(3, 8, 24)
    own = dape.init(jax.random.key(0), dims)
    count = sum(x.size for x in jax.tree.leaves(own))
    assert count == 6 * 32 + 32 + 32 * 3 + 3
    shared = dape.init_shared(jax.random.key(0), dims)
    assert sum(x.size for x in jax.tree.leaves(shared)) == 6  # KERPLE's p and a


def test_errors():
    with pytest.raises(ValueError, match="hidden must be positive"):
        Dape(hidden=0)
    with pytest.raises(ValueError, match="did you mean 'alibi'"):
        make("dape", inner={"name": "alibbi"})

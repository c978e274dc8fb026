"""xPos against the paper's formula, near, far and farther than factors can reach."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from relpos_jax import where
from relpos_jax.attention import attend
from relpos_jax.positional.xpos import Xpos, xpos_rates, xpos_scales
from relpos_jax.where import Where


def naive_scores(q, k, q_position, k_position, scale_base, base=10000.0):
    """Sun et al. 2022, their score by complex numbers, in float64: `[q k]`."""
    dim = q.shape[-1]
    scores = np.zeros((len(q_position), len(k_position)))
    for a, m in enumerate(q_position):
        for b, n in enumerate(k_position):
            for i in range(dim // 2):
                distance = float(m) - float(n)
                zeta = (2 * i / dim + 0.4) / 1.4
                turn = np.exp(1j * distance * base ** (-2 * i / dim))
                x = complex(q[a, 2 * i], q[a, 2 * i + 1])
                y = complex(k[b, 2 * i], -k[b, 2 * i + 1])
                if distance >= 0:
                    scores[a, b] += (
                        zeta ** (distance / scale_base) * (x * y * turn).real
                    )
    return scores


def naive_attention(q, k, v, position, scale_base):
    scores = naive_scores(q, k, position, position, scale_base) / np.sqrt(q.shape[-1])
    seen = position[:, None] >= position[None, :]
    weights = np.where(seen, np.exp(scores), 0)
    return weights / weights.sum(axis=1, keepdims=True) @ v


def attention(encoding, q, k, v, position, **options):
    at = Where(jnp.asarray(position)[None], jnp.ones((1, len(position)), jnp.int32))
    q, k, v = (jnp.asarray(x, jnp.float32)[None, :, None] for x in (q, k, v))
    return attend(encoding, {}, q, k, v, at, at, **options)[0, :, 0]


POSITIONS = {
    "near": [0, 1, 2, 3, 4],
    "moved": [1_000_000, 1_000_001, 1_000_002, 1_000_003, 1_000_004],
    "spread": [0, 1000, 1003, 100_000, 1_000_000],
}


@pytest.mark.parametrize("implementation", ["dense", "blockwise"])
@pytest.mark.parametrize("name", POSITIONS)
def test_the_paper_s_scores_at_any_position(name, implementation):
    position = np.asarray(POSITIONS[name])
    q, k, v = np.random.default_rng(0).normal(size=(3, 5, 8))
    found = attention(Xpos(), q, k, v, position, implementation=implementation)
    wanted = naive_attention(q, k, v, position, 512.0)
    np.testing.assert_allclose(found, wanted, atol=1e-3 if name != "near" else 2e-6)


def test_gradients_are_finite_and_equal_on_both_paths():
    q, k, v = jax.random.normal(jax.random.key(0), (3, 6, 8))
    position = np.arange(6)

    def loss(encoding, q, k):
        return jnp.sum(jnp.sin(attention(encoding, q, k, v, position)))

    # With a base this small the queries are out of reach of any centre.
    encoding = Xpos(scale_base=0.04)
    assert encoding.reach(8) < 2
    found = jax.grad(loss, argnums=(1, 2))(encoding, q, k)
    assert all(np.all(np.isfinite(x)) for x in found)
    near, far = Xpos(scale_base=3.0), Xpos(scale_base=3.0)
    object.__setattr__(far, "reach", lambda dim: 0.0)
    by_factors = jax.grad(loss, argnums=(1, 2))(near, q, k)
    one_by_one = jax.grad(loss, argnums=(1, 2))(far, q, k)
    for x, y in zip(by_factors, one_by_one, strict=True):
        np.testing.assert_allclose(x, y, atol=2e-6)


def test_scores_do_not_depend_on_the_centre():
    q, k = jax.random.normal(jax.random.key(1), (2, 1, 5, 1, 8))
    at, encoding = where.contiguous(1, 5), Xpos(scale_base=8.0)
    scores = []
    for centre in (0, 2, 3, 40):
        params = {"centre": jnp.full((1, 1), centre)}
        pair = encoding.query(params, q, at), encoding.key(params, k, at)
        scores.append(jnp.einsum("bqhd,bkhd->bhqk", *pair))
    for other in scores[1:]:
        np.testing.assert_allclose(scores[0], other, rtol=1e-4, atol=1e-5)
    causal = np.tril(np.ones((5, 5)))
    wanted = naive_scores(q[0, :, 0], k[0, :, 0], range(5), range(5), 8.0)
    np.testing.assert_allclose(scores[0][0, 0] * causal, wanted, atol=1e-5)


def test_rates_and_scales():
    np.testing.assert_allclose(xpos_rates(4), [0.4 / 1.4, 0.9 / 1.4])
    found = xpos_scales(jnp.asarray([[-512, 0, 512, -(10**7)]]), 4)
    wanted = [[1.4 / 0.4, 1.4 / 0.9], [1, 1], [0.4 / 1.4, 0.9 / 1.4]]
    np.testing.assert_allclose(found[0, :3], wanted, rtol=1e-6)
    assert np.all(np.isfinite(found))


def test_float16_does_not_overflow_and_padding_does_not_move_the_centre():
    q = jax.random.normal(jax.random.key(2), (1, 4, 1, 8)).astype(jnp.float16)
    at = Where(jnp.asarray([[9000, 0, 5000, 9001]]), jnp.asarray([[1, 0, 1, 1]]))
    out = attend(Xpos(), {}, q, q, q, at, at)
    assert out.dtype == jnp.float16 and np.all(np.isfinite(out))
    params, _, _ = Xpos().prepare({}, None, at, at, None)
    assert params["centre"].tolist() == [[7000]]


def test_what_makes_no_sense_is_refused():
    with pytest.raises(ValueError, match="must be positive"):
        Xpos(scale_base=0.0)
    with pytest.raises(ValueError, match="even dim"):
        xpos_rates(5)
    with pytest.raises(ValueError, match="the params that `prepare` returns"):
        Xpos().query({}, jnp.zeros((1, 2, 1, 8)), where.contiguous(1, 2))

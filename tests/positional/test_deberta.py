"""DeBERTa's disentangled attention (He et al. 2021)."""

import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from relpos_jax import where
from relpos_jax.attention import attend
from relpos_jax.masks import Bidirectional
from relpos_jax.positional import Dims, make, merge
from relpos_jax.positional.deberta import (
    Deberta,
    log_bucket,
    log_bucket_edges,
    relative_row,
)

DIMS = Dims(2, 4, 6)
T = 5


def params_of(deberta):
    own = deberta.init(jax.random.key(0), DIMS)
    params = merge(own, deberta.init_shared(jax.random.key(1), DIMS))
    return jax.tree.map(lambda x: x + 0.1 + 5 * x, params)


def heads(seed, length=T):
    return jax.random.normal(
        jax.random.key(seed), (1, length, DIMS.heads, DIMS.head_dim)
    )


def weights_of(deberta, params, q, k, q_at, k_at):
    keys = k.shape[1]
    v = jnp.broadcast_to(jnp.eye(keys)[None, :, None], (1, keys, DIMS.heads, keys))
    out = attend(deberta, params, q, k, v, q_at, k_at, mask=Bidirectional())
    return np.asarray(jnp.swapaxes(out, 1, 2)[0])


def by_loops(deberta, params, q, k):
    """Equation 4, pair by pair, with either reading of its last index."""
    params = {name: np.asarray(x, np.float64) for name, x in params.items()}
    q, k = np.asarray(q[0], np.float64), np.asarray(k[0], np.float64)
    span, table = deberta.span, params["embeddings"]
    weights = np.zeros((DIMS.heads, T, T))
    for h in range(DIMS.heads):
        for i in range(T):
            for j in range(T):
                row = min(max(i - j + span, 0), 2 * span - 1)
                back = min(max(j - i + span, 0), 2 * span - 1)
                e = q[i, h] @ k[j, h]
                if "c2p" in deberta.terms:
                    relative = table[row] @ params["key"][:, h]
                    e += q[i, h] @ (
                        relative + params.get("key_bias", np.zeros((2, 4)))[h]
                    )
                if "p2c" in deberta.terms:
                    at = row if deberta.p2c_index == "code" else back
                    relative = table[at] @ params["query"][:, h]
                    relative = relative + params.get("query_bias", np.zeros((2, 4)))[h]
                    e += k[j, h] @ relative
                weights[h, i, j] = e / math.sqrt(4 * (1 + len(deberta.terms)))
    weights = np.exp(weights)
    return weights / weights.sum(axis=-1, keepdims=True)


VARIANTS = {
    "both": {},
    "paper": {"p2c_index": "paper"},
    "c2p": {"terms": ("c2p",)},
    "p2c": {"terms": ("p2c",)},
    "p2c paper": {"terms": ("p2c",), "p2c_index": "paper"},
    "bias": {"bias": True},
}


@pytest.mark.parametrize("name", VARIANTS)
def test_equation(name):
    deberta = Deberta(span=3, **VARIANTS[name])
    params = params_of(deberta)
    q, k, at = heads(2), heads(3), where.contiguous(1, T)
    ours = weights_of(deberta, params, q, k, at, at)
    np.testing.assert_allclose(ours, by_loops(deberta, params, q, k), atol=1e-5)


def test_each_choice_matters():
    q, k, at = heads(2), heads(3), where.contiguous(1, T)
    found = []
    for name in ("both", "paper", "c2p", "p2c", "p2c paper"):
        deberta = Deberta(span=3, **VARIANTS[name])
        found.append(weights_of(deberta, params_of(deberta), q, k, at, at))
    for a in range(len(found)):
        for b in range(a):
            assert np.abs(found[a] - found[b]).max() > 1e-3


def test_more_keys_than_queries_are_the_last_rows():
    deberta = Deberta(span=3)
    params, q, k = params_of(deberta), heads(2), heads(3)
    at = where.contiguous(1, T)
    whole = weights_of(deberta, params, q, k, at, at)
    late = jax.tree.map(lambda x: x[:, 2:], at)
    part = weights_of(deberta, params, q[:, 2:], k, late, at)
    np.testing.assert_allclose(part, whole[:, 2:], atol=1e-6)


@pytest.mark.parametrize("terms", [("c2p",), ("p2c",), ("c2p", "p2c")])
def test_scale_counts_the_terms(terms):
    assert Deberta(terms=terms).scale(16) == (16 * (1 + len(terms))) ** -0.5


def test_rows():
    distance = jnp.asarray([-9, -4, -3, -1, 0, 1, 3, 4, 9])
    assert relative_row(distance, span=4).tolist() == [0, 0, 1, 3, 4, 5, 7, 7, 7]


@pytest.mark.parametrize("buckets, far", [(8, 32), (32, 128), (256, 512)])
def test_log_buckets(buckets, far):
    mid = buckets // 2
    distance = np.arange(-2 * far, 2 * far + 1)
    ours = np.asarray(
        log_bucket(jnp.asarray(distance), buckets=buckets, max_position=far)
    )
    for d, found in zip(distance, ours, strict=True):
        expected = abs(d)
        if expected > mid:
            share = math.log(expected / mid) / math.log((far - 1) / mid) * (mid - 1)
            # Taken off so that an exact edge stays in its bucket.
            expected = mid + math.ceil(share - 1e-9)
        assert found == np.sign(d) * expected, d
    assert log_bucket(jnp.asarray([far - 1]), buckets=buckets, max_position=far) == (
        buckets - 1
    )


def test_log_bucket_edges_are_in_order():
    edges = log_bucket_edges(256, 512, 128)
    assert edges[0] == 128 and edges[127] == 511
    assert list(edges) == sorted(edges)


def test_limited_buckets_are_the_clipped_ones():
    distance = jnp.arange(-300, 301)
    all_of_them = log_bucket(distance, buckets=8, max_position=32)
    some = log_bucket(distance, buckets=8, max_position=32, last=8)
    np.testing.assert_array_equal(some, jnp.clip(all_of_them, -8, 8))
    rows = relative_row(distance, span=32, buckets=8)
    np.testing.assert_array_equal(rows, jnp.clip(all_of_them + 8, 0, 15))


@pytest.mark.parametrize(
    "name, knobs, own, shared",
    [
        ("deberta", {}, 2 * 24 * 24, 256 * 24),
        ("deberta", {"terms": ["c2p"]}, 24 * 24, 256 * 24),
        ("deberta", {"span": 512}, 2 * 24 * 24, 1024 * 24),
        ("deberta_v2", {}, 2 * (24 * 24 + 24), 64 * 24),
    ],
)
def test_parameters(name, knobs, own, shared):
    deberta, dims = make(name, **knobs), Dims(3, 8, 24)
    count = sum(x.size for x in deberta.init(jax.random.key(0), dims).values())
    all_layers = sum(
        x.size for x in deberta.init_shared(jax.random.key(0), dims).values()
    )
    assert (count, all_layers) == (own, shared)


@pytest.mark.parametrize(
    "knobs, match",
    [
        ({"terms": ("p2p",)}, "unknown term 'p2p'"),
        ({"terms": ()}, "one or two"),
        ({"terms": ("c2p", "c2p")}, "one or two"),
        ({"p2c_index": "other"}, "code or paper"),
        ({"span": 0}, "span must be positive"),
        ({"buckets": 256, "span": 100}, "max_position 100"),
    ],
)
def test_errors(knobs, match):
    with pytest.raises(ValueError, match=match):
        Deberta(**knobs)

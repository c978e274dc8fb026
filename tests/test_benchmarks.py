"""Peers without another library compute what ours do; tables say what is left out."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from absl import flags

from experiments.benchmarks import rounds, tables
from experiments.benchmarks.peers import naive, naive_attention
from experiments.benchmarks.workloads import WORKLOADS, Workload
from relpos_jax import positional, where
from relpos_jax.attention import attend


@pytest.mark.parametrize("name", ["none", "rope", "alibi"])
def test_naive_attention_is_ours(name):
    keys = jax.random.split(jax.random.key(0), 3)
    q, k, v = (jax.random.normal(key, (1, 9, 2, 8)) for key in keys)
    at = where.contiguous(1, 9)
    wanted = attend(positional.make(name), {}, q, k, v, at, at)
    found = naive_attention.ENCODINGS[name](q, k, v, jnp.zeros(1))
    np.testing.assert_allclose(found, wanted, rtol=1e-5, atol=1e-5)


def test_naive_transformer_xl_shifts_by_distance():
    keys = jax.random.split(jax.random.key(0), 4)
    q, k, v, r = (jax.random.normal(key, (1, 5, 2, 4)) for key in keys)
    u, w = jnp.full((2, 4), 0.1), jnp.full((2, 4), -0.2)
    visible = jnp.tril(jnp.ones((5, 5), bool))
    found = naive.transformer_xl(q, k, v, r[0], u, w, visible)
    scores = np.full((2, 5, 5), -np.inf)
    for h in range(2):
        for i in range(5):
            for j in range(i + 1):
                near = np.dot(q[0, i, h] + u[h], k[0, j, h])
                far = np.dot(q[0, i, h] + w[h], r[0, 4 - (i - j), h])
                scores[h, i, j] = (near + far) / 2
    weights = jax.nn.softmax(scores, axis=-1)
    wanted = jnp.einsum("hqk,khd->qhd", weights, v[0])
    np.testing.assert_allclose(found[0], wanted, rtol=1e-4, atol=1e-5)


def test_operations_of_a_step():
    # 51.4 and 74.4 GFLOP by another count of the same products, rounded.
    assert WORKLOADS["W1"].operations == pytest.approx(51.4e9, rel=0.06)
    assert WORKLOADS["W2"].operations == pytest.approx(74.4e9, rel=0.06)
    assert Workload(batch=2, length=3, memory=0).tokens == 6


def test_a_table_names_what_was_left_out():
    row = {"peer": "ours:rope", "models": ["rope"], "seconds": 2.0}
    document = dict(processor="p", cores=2, device="d", python="3", commit="c")
    document |= dict(versions={"jax": "1"}, command="python -m x", kind="study")
    document["results"] = [{"rows": [row], "left_out": {"hf": "is not installed"}}]
    text = tables.markdown(document)
    assert "| ours:rope | rope | 2 | 1.00 |" in text
    assert "Left out: hf: is not installed" in text


@pytest.mark.slow
def test_peers_in_turn_and_missing_ones():
    if not flags.FLAGS.is_parsed():
        flags.FLAGS(["test", "--rounds=2"])
    tiny = vars(WORKLOADS["tiny"])
    rows, left_out = rounds.compare(
        "training", ["naive", "ours:rope", "official"], {"workload": tiny}
    )
    assert [row["peer"] for row in rows] == ["naive", "ours:rope"]
    assert rows[0]["ratio"] == 1 and rows[1]["seconds"] > 0
    assert "official" in left_out

"""The loss: sums and counts, float32, nothing read where nothing is scored."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from relpos_jax.training import losses


@pytest.fixture(scope="module")
def case():
    rng = np.random.default_rng(0)
    logits = rng.normal(size=(2, 3, 5)).astype(np.float32)
    targets = rng.integers(0, 5, (2, 3)).astype(np.int32)
    weight = np.array([[1, 1, 0], [1, 0, 1]], np.float32)
    return jnp.asarray(logits), jnp.asarray(targets), jnp.asarray(weight)


def test_is_the_formula(case):
    logits, targets, weight = (np.asarray(x) for x in case)
    expected = 0.0
    for b in range(2):
        for t in range(3):
            shares = np.exp(logits[b, t]) / np.exp(logits[b, t]).sum()
            expected -= weight[b, t] * np.log(shares[targets[b, t]])
    sums = losses.next_token(*case)
    np.testing.assert_allclose(sums.loss, expected, rtol=1e-6)
    assert float(sums.count) == 4


def test_sums_add_up_over_any_split(case):
    whole = losses.next_token(*case)
    rows = [losses.next_token(*(x[b : b + 1] for x in case)) for b in range(2)]
    np.testing.assert_allclose(whole.loss, sum(row.loss for row in rows), rtol=1e-6)
    assert whole.count == sum(row.count for row in rows)


def test_targets_are_not_shifted():
    targets = jnp.arange(1, 7, dtype=jnp.int32)[None]
    weight = jnp.ones((1, 6))
    knows = 1e4 * jax.nn.one_hot(targets, 8)
    repeats = 1e4 * jax.nn.one_hot(targets - 1, 8)
    assert float(losses.next_token(knows, targets, weight).loss) == 0
    assert float(losses.next_token(repeats, targets, weight).loss) > 1e4


def test_padding_reaches_neither_sum_nor_gradient(case):
    logits, targets, weight = case
    bad = jnp.where(weight[..., None] > 0, logits, jnp.nan)
    off = jnp.where(weight > 0, targets, -1)

    def loss(logits, targets):
        return losses.next_token(logits, targets, weight).loss

    assert loss(bad, off) == loss(logits, targets)
    gradient = jax.grad(loss)(bad, off)
    assert np.isfinite(gradient).all()
    assert not np.any(gradient[weight == 0])


@pytest.mark.parametrize("wrong", [-1, 5, 1000])
def test_an_id_outside_the_vocabulary_gives_nan(case, wrong):
    logits, targets, weight = case
    targets = targets.at[0, 0].set(wrong)
    assert np.isnan(losses.next_token(logits, targets, weight).loss)


def test_no_targets_give_zero_of_zero(case):
    logits, targets, weight = case
    assert losses.next_token(logits, targets, 0 * weight) == (0.0, 0.0)


def test_low_precision_logits_are_summed_in_float32(case):
    logits, targets, weight = case
    low = jnp.asarray(logits, jnp.bfloat16)
    sums = losses.next_token(low, targets, weight)
    exact = losses.next_token(low.astype(jnp.float32), targets, weight)
    assert sums.loss.dtype == jnp.float32
    assert sums.loss == exact.loss

"""With memory, a query stands behind its slots: distances must not shrink (B03)."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from relpos_jax import where
from relpos_jax.interop.parity.common import probabilities
from relpos_jax.masks import Causal
from relpos_jax.positional import Dims, make, merge

DIMS = Dims(3, 8, 24)
NAMES = ["alibi", "t5", "kerple_log", "kerple_power", "fire", "sandwich"]
NAMES += ["continuous_bias", "dape", "shaw", "transformer_xl", "deberta", "deberta_v2"]


def setting(name):
    encoding = make(name, **({"values": False} if name == "shaw" else {}))
    own = encoding.init(jax.random.key(0), DIMS)
    params = merge(own, encoding.init_shared(jax.random.key(1), DIMS))
    # Far from 0, so that the bias shows.
    params = jax.tree.map(lambda x: 3 * x + 0.1, params)
    first, second = jax.random.split(jax.random.key(2))
    q = jax.random.normal(first, (1, 6, DIMS.heads, DIMS.head_dim))
    k = jax.random.normal(second, (1, 6, DIMS.heads, DIMS.head_dim))
    return encoding, params, q, k


@pytest.mark.parametrize("name", NAMES)
def test_second_segment_is_the_last_rows(name):
    encoding, params, q, k = setting(name)
    at = where.contiguous(1, 6)
    late = jax.tree.map(lambda x: x[:, 3:], at)
    whole = probabilities(encoding, params, q, k, at, at, Causal())
    part = probabilities(encoding, params, q[:, 3:], k, late, at, Causal())
    np.testing.assert_allclose(part, whole[:, :, 3:], atol=1e-6)
    # Counted from the segment's own start, the weights would be others.
    wrong = late._replace(position=late.position - 3)
    keys = at._replace(position=jnp.where(at.position < 3, 0, at.position - 3))
    other = probabilities(encoding, params, q[:, 3:], k, wrong, keys, Causal())
    assert np.abs(np.asarray(other - part)).max() > 1e-3


@pytest.mark.parametrize("name", NAMES)
def test_an_empty_slot_changes_no_distance(name):
    encoding, params, q, k = setting(name)
    at = where.contiguous(1, 6)
    late = jax.tree.map(lambda x: x[:, 3:], at)
    slots = at._replace(segment=at.segment.at[0, 0].set(0))
    part = probabilities(encoding, params, q[:, 3:], k, late, slots, Causal())
    without = jax.tree.map(lambda x: x[:, 1:], at)
    less = probabilities(encoding, params, q[:, 3:], k[:, 1:], late, without, Causal())
    np.testing.assert_array_equal(part[..., 0], 0)
    np.testing.assert_allclose(part[..., 1:], less, atol=1e-6)

"""Learned absolute embeddings, and what happens past their table."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from relpos_jax import where
from relpos_jax.positional import Dims, make

DIMS = Dims(3, 8, 24)


def embedded(at, **knobs):
    """Returns what an encoding with a table of 6 rows adds, and the table."""
    learned = make("learned", rows=6, **knobs)
    params = learned.init_shared(jax.random.key(0), DIMS)
    zeros = jnp.zeros((*at.position.shape, DIMS.width))
    return np.asarray(learned.embed(params, zeros, at)), np.asarray(params["table"])


def test_adds_the_row_of_each_position():
    at = where.packed((2, 3), 6)
    ours, table = embedded(at)
    rows = [0, 1, 0, 1, 2]
    for t, row in enumerate(rows):
        np.testing.assert_array_equal(ours[0, t], table[row])
    np.testing.assert_array_equal(ours[0, 5], 0)  # padding


@pytest.mark.parametrize(
    "beyond, rows", [("last", [4, 5, 5, 5]), ("wrap", [4, 5, 0, 1])]
)
def test_past_the_table_by_choice(beyond, rows):
    ours, table = embedded(where.contiguous(1, 4, start=4), beyond=beyond)
    np.testing.assert_array_equal(ours[0], table[rows])


def test_past_the_table_is_refused():
    with pytest.raises(ValueError, match="7 tokens are longer than the learned table"):
        embedded(where.contiguous(1, 7))
    ours, table = embedded(where.contiguous(1, 4, start=4))
    np.testing.assert_array_equal(ours[0, :2], table[4:])
    assert np.isnan(ours[0, 2:]).all()
    ours, _ = embedded(where.contiguous(1, 2, start=-1))
    assert np.isnan(ours[0, 0]).all() and not np.isnan(ours[0, 1]).any()


def test_positions_must_be_integers():
    at = where.contiguous(1, 3)
    with pytest.raises(ValueError, match="must be integers"):
        embedded(at._replace(position=at.position.astype(jnp.float32)))


def test_parameters():
    learned = make("learned")
    assert learned.init_shared(jax.random.key(0), DIMS)["table"].shape == (512, 24)
    assert not learned.init(jax.random.key(0), DIMS)


def test_errors():
    with pytest.raises(ValueError, match="rows must be positive"):
        make("learned", rows=0)
    with pytest.raises(ValueError, match="beyond must be"):
        make("learned", beyond="guess")

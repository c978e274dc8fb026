"""T5's buckets (Raffel et al. 2020)."""

import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from relpos_jax import where
from relpos_jax.positional import Dims, make
from relpos_jax.positional.t5 import T5, bucket_edges, relative_position_bucket

# First distance of each bucket (32 buckets, 128).
CAUSAL = {**{n: n for n in range(17)}, 19: 17, 21: 18, 24: 19, 27: 20, 31: 21, 35: 22}
CAUSAL |= {40: 23, 46: 24, 52: 25, 59: 26, 67: 27, 77: 28, 87: 29, 99: 30, 113: 31}
BOTH = {
    **{n: n for n in range(9)},
    12: 9,
    16: 10,
    23: 11,
    32: 12,
    46: 13,
    64: 14,
    91: 15,
}


def bucket(distance, **knobs):
    return relative_position_bucket(jnp.asarray(distance), **knobs).tolist()


def test_causal_edges():
    assert bucket(list(CAUSAL)) == list(CAUSAL.values())
    # The distance before each edge is still in the bucket before.
    before = [n - 1 for n in CAUSAL if n]
    assert bucket(before) == [b - 1 for n, b in CAUSAL.items() if n]
    assert bucket([-1, -5, -1000]) == [0, 0, 0]
    assert bucket([1_000_000]) == [31]


def test_bidirectional_edges():
    assert bucket(list(BOTH), bidirectional=True) == list(BOTH.values())
    after = [-n for n in BOTH if n]
    expected = [b + 16 for n, b in BOTH.items() if n]
    assert bucket(after, bidirectional=True) == expected
    assert bucket([-1, -8], bidirectional=True) == [17, 24]
    before = [n - 1 for n in BOTH if n]
    assert bucket(before, bidirectional=True) == [b - 1 for n, b in BOTH.items() if n]
    assert bucket([1_000_000, -1_000_000], bidirectional=True) == [15, 31]


@pytest.mark.parametrize("buckets, far", [(8, 10), (16, 64), (32, 128), (32, 1000)])
def test_definition(buckets, far):
    exact = buckets // 2
    for n in range(0, 1500, 7):
        expected = n
        if n >= exact:
            share = math.log(n / exact) / math.log(far / exact) * (buckets - exact)
            if abs(share - round(share)) < 1e-9:
                continue  # an edge: double precision may fall on either side
            expected = min(exact + int(share), buckets - 1)
        assert bucket([n], buckets=buckets, max_distance=far) == [expected]


def test_integers_whatever_the_type():
    # A logarithm in bfloat16 would move each of the first four by one bucket.
    distance = jnp.asarray([45, 90, 76, 112, 46, 91, 77, 113])
    expected = relative_position_bucket(distance)
    assert expected.tolist() == [23, 29, 27, 30, 24, 29, 28, 31]
    narrow = relative_position_bucket(distance.astype(jnp.int16))
    np.testing.assert_array_equal(narrow, expected)


@pytest.mark.parametrize("bidirectional", [False, True])
def test_equation(bidirectional):
    t5 = T5(buckets=8, max_distance=10, bidirectional=bidirectional)
    params = t5.init_shared(jax.random.key(0), Dims(3, 8, 24))
    ours = t5.table(params, jnp.arange(5)[:, None] - jnp.arange(5)[None, :])
    for i in range(5):
        for j in range(5):
            row = bucket(
                [i - j], buckets=8, max_distance=10, bidirectional=bidirectional
            )
            np.testing.assert_array_equal(ours[i, j], params["table"][row[0]])


def test_memory_offsets_the_query():
    # Two segments of 3: the second one's bias is rows 3..5 of the whole (B03).
    t5 = T5(buckets=8, max_distance=10)
    params = t5.init_shared(jax.random.key(0), Dims(3, 8, 24))
    whole = where.contiguous(1, 6).position[0]
    rows = t5.table(params, whole[:, None] - whole[None, :])[3:]
    late = where.contiguous(1, 3, start=3).position[0]
    np.testing.assert_array_equal(
        t5.table(params, late[:, None] - whole[None, :]), rows
    )


def test_logits_are_not_scaled_and_the_queries_start_smaller():
    assert T5().scale(64) == 1.0 and T5().query_gain(64) == 0.125


def test_parameters():
    t5, dims = make("t5"), Dims(3, 8, 24)
    assert t5.init_shared(jax.random.key(0), dims)["table"].shape == (32, 3)
    assert not t5.init(jax.random.key(0), dims)


def test_errors():
    with pytest.raises(ValueError, match="max_distance 4"):
        T5(buckets=8, max_distance=4)
    with pytest.raises(ValueError, match="even"):
        relative_position_bucket(jnp.arange(3), buckets=7, bidirectional=True)
    assert bucket_edges(8, 10)[:4] == (1, 2, 3, 4)

"""Sparse patterns: which pairs attend, at what cost, and what is refused."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from relpos_jax import config as configs
from relpos_jax import where
from relpos_jax.attention import attend
from relpos_jax.attention.patterns import (
    PATTERNS,
    BigBird,
    Dilated,
    Fixed,
    Strided,
    WindowGlobal,
    check_sense,
)
from relpos_jax.masks import Bidirectional, Window
from relpos_jax.models import ModelConfig
from relpos_jax.positional import PositionEncoding, make
from relpos_jax.relative import Layout
from relpos_jax.where import Where

NONE = PositionEncoding()


def seen(mask, length=24):
    """Returns the mask of one document that counts from 0."""
    at = where.contiguous(1, length)
    return np.asarray(mask(at, at))[0]


def by_rule(rule, length=24, causal=True):
    """Returns the same from a rule in plain Python."""
    pairs = [
        [rule(i, j) and not (causal and j > i) for j in range(length)]
        for i in range(length)
    ]
    return np.array(pairs)


def test_dilated_is_longformer_s_window_with_gaps():
    def rule(i, j):
        return abs(i - j) in (0, 3, 6, 9)

    assert (seen(Dilated(4, 3)) == by_rule(rule)).all()
    both = seen(Dilated(4, 3, causal=False))
    assert (both == by_rule(rule, causal=False)).all()
    assert (seen(Dilated(4, 1)) == seen(Window(4))).all()


def test_window_global_sees_and_is_seen_by_all():
    def rule(i, j):
        return abs(i - j) < 3 or i in (0, 9) or j in (0, 9)

    assert (seen(WindowGlobal(3, (0, 9))) == by_rule(rule)).all()
    both = seen(WindowGlobal(3, (0, 9), causal=False))
    assert (both == by_rule(rule, causal=False)).all()
    assert (seen(WindowGlobal(3, ())) == seen(Window(3))).all()


def test_strided_and_fixed_are_the_sparse_transformer_s():
    def strided(i, j):
        # Both heads of the paper; its first has the distance 5 too, as the second.
        return max(0, i - 5) <= j or (i - j) % 5 == 0

    def fixed(i, j):
        return i // 5 == j // 5 or j % 5 in (3, 4)

    assert (seen(Strided(5)) == by_rule(strided)).all()
    assert (seen(Fixed(5, 2)) == by_rule(fixed)).all()
    both = seen(Strided(5, causal=False))
    assert (both == both.T).all() and (np.tril(both) == seen(Strided(5))).all()


def test_big_bird_is_near_global_and_random_blocks():
    mask = BigBird(2, window=3, random=2, global_blocks=(0, 4), seed=1)
    x = jnp.arange(12)
    drawn = np.stack([np.asarray(mask.random_block(x, n)) for n in (0, 1)], 1)

    def rule(i, j):
        i, j = i // 2, j // 2
        near, wide = abs(i - j) <= 1, i in (0, 4) or j in (0, 4)
        return near or wide or j in drawn[i]

    assert (seen(mask) == by_rule(rule)).all()
    for block, row in enumerate(drawn):
        real = row[row >= 0]  # no two are one, and none is at or behind the query
        assert len(set(real)) == len(real) == min(block, 2) and (real < block).all()
    other = BigBird(2, window=3, random=2, global_blocks=(0, 4), seed=2)
    assert (seen(mask) != seen(other)).any()
    # Every block is drawn by some seed: the parts cover all that there are.
    found = {
        int(BigBird(2, random=2, seed=seed).random_block(jnp.array([7]), n)[0])
        for seed in range(60)
        for n in (0, 1)
    }
    assert found == set(range(7))


def test_big_bird_takes_random_blocks_from_a_table():
    mask = BigBird(4, 1, 1, (), causal=False, table=((2,), (0,), (5,)))
    blocks = seen(mask)[::4, ::4]
    wanted = np.eye(6, dtype=bool)
    wanted[[0, 1, 2], [2, 0, 5]] = True
    assert (blocks == wanted).all()


EVERY = [
    Dilated(3, 5),
    WindowGlobal(4, (1, 2, 11)),
    BigBird(3, 1, 2, (0,)),
    BigBird(3, 3, 2, (0, 9), causal=False, blocks=10),
    Strided(4),
    Fixed(5, 1),
]


@pytest.mark.parametrize("mask", EVERY, ids=lambda mask: type(mask).__name__)
def test_strips_are_disjoint_and_together_the_mask(mask):
    at = where.contiguous(1, 40)
    total = 0
    for strip in mask.strips():
        part = strip.mask(at, at)
        if strip.gather == "keys":
            part &= strip.mask.picks(at.position)[:, None, :]
        if strip.gather == "queries":
            part &= strip.mask.picks(at.position)[:, :, None]
        total = total + part.astype(int)
    np.testing.assert_array_equal(total, mask(at, at).astype(int))


@pytest.mark.parametrize("mask", EVERY, ids=lambda mask: type(mask).__name__)
def test_positions_count_within_documents(mask):
    # The second document sees what it would see alone.
    at = where.packed((13, 11), 24)
    found = np.asarray(mask(at, at))[0]
    assert (found[:13, :13] == seen(mask, 13)).all()
    assert (found[13:, 13:] == seen(mask, 11)).all()
    assert not found[:13, 13:].any() and not found[13:, :13].any()


def temporaries(mask, length):
    """Returns the operations and the bytes of a backward pass."""
    at = where.contiguous(1, length)
    x = jax.ShapeDtypeStruct((1, length, 2, 16), jnp.float32)

    def loss(q, k, v):
        out = attend(
            NONE,
            {},
            q,
            k,
            v,
            at,
            at,
            mask=mask,
            layout=Layout(),
            implementation="blockwise",
            blocks=(32, 32),
        )
        return out.sum()

    gradient = jax.jit(jax.grad(loss, argnums=(0, 1, 2)))
    return gradient.lower(x, x, x).compile().memory_analysis().temp_size_in_bytes


def slow(mask):
    return pytest.param(mask, marks=pytest.mark.slow)


@pytest.mark.parametrize(
    "mask",
    [
        Window(64),
        slow(Dilated(8, 8)),
        slow(WindowGlobal(64, (0, 700))),
        slow(Strided(32)),
    ],
    ids=lambda mask: type(mask).__name__,
)
def test_memory_grows_linearly(mask):
    assert temporaries(mask, 4096) < 2.2 * temporaries(mask, 2048)


def visited(mask, length, block=32):
    """Returns how many blocks a forward pass visits, of all strips."""
    from relpos_jax.attention import blockwise
    from relpos_jax.attention import plan as plans

    count = 0

    def counting(step, carry, plan, near, far, q_at, k_at):
        nonlocal count
        rows = q_at.position.shape[0]
        if plan.search:
            count += rows * int(plans.search(plan, near, q_at, k_at)[1])
        else:
            count += rows * (len(near) + len(far))
        return carry

    at = where.contiguous(1, length)
    x = jnp.ones((1, length, 1, 4))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(blockwise, "_scan", counting)
        attend(
            NONE,
            {},
            x,
            x,
            x,
            at,
            at,
            mask=mask,
            layout=Layout(),
            implementation="blockwise",
            blocks=(block, block),
        )
    return count


@pytest.mark.parametrize(
    "mask",
    [
        slow(Dilated(16, 16)),
        slow(WindowGlobal(64, (0, 300, 777))),
        WindowGlobal(64, (0, 300, 777), causal=False),
        BigBird(32),
        slow(BigBird(32, causal=False, blocks=64)),
    ],
    ids=repr,
)
def test_blocks_visited_grow_linearly(mask):
    few, many = visited(mask, 2048), visited(mask, 4096)
    assert many < 2.3 * few
    assert many < 0.25 * visited(Bidirectional(), 4096)


def test_strided_and_fixed_visit_fewer_blocks_than_half():
    for mask in (Strided(64), Fixed(64, 1)):
        assert visited(mask, 4096) < 0.25 * visited(Bidirectional(), 4096)


def test_what_makes_no_sense_is_refused_with_the_reason():
    for pattern in EVERY:
        with pytest.raises(ValueError, match="counts over all keys"):
            check_sense(make("cope"), pattern)
    with pytest.raises(ValueError, match="later ones attend"):
        check_sense(make("xpos"), Dilated(3, 2, causal=False))
    check_sense(make("cope"), Window(5))
    for wrong, message in [
        (lambda: Dilated(0, 2), "width must be at least 1"),
        (lambda: Strided(0), "stride must be at least 1"),
        (lambda: Fixed(3, 4), "no 4 last ones"),
        (lambda: BigBird(4, window=2), "must be odd"),
        (lambda: BigBird(4, causal=False), "set blocks"),
        (lambda: BigBird(4, random=1, table=((1, 2),)), "random = 1"),
    ]:
        with pytest.raises(ValueError, match=message):
            wrong()


SIZES = dict(vocabulary=9, layers=2, width=8, heads=2, head_dim=4, feedforward=8)


def test_a_model_takes_patterns_by_layer():
    config = ModelConfig(
        **SIZES, position=make("rope"), pattern=(Window(4), Dilated(3, 4))
    )
    assert config.masks == (Window(4), Dilated(3, 4)) and config.reach == 9
    for changes, message in [
        (dict(window=3, pattern=Strided(3)), "set one of them"),
        (dict(pattern=Dilated(3, 2, causal=False)), "must not see what it is"),
        (dict(pattern=Fixed(3, 1), bidirectional=True), "an encoder looks to both"),
        (dict(pattern=Strided(3), position=make("cope")), "nothing would be saved"),
        (dict(pattern=()), "empty tuple"),
    ]:
        with pytest.raises(ValueError, match=message):
            ModelConfig(**SIZES, **{"position": make("rope"), **changes})


def test_patterns_come_from_configs_and_return_from_files():
    knobs = {
        "window": dict(width=4),
        "dilated": dict(width=4, dilation=3),
        "window_global": dict(width=4, positions=(0, 5)),
        "big_bird": dict(block=4, global_blocks=(0,)),
        "strided": dict(stride=4),
        "fixed": dict(block=4, summary=1),
    }
    assert set(knobs) == set(PATTERNS)
    for name, values in knobs.items():
        section = configs.section(
            ModelConfig,
            **{k: v for k, v in SIZES.items() if k != "vocabulary"},
            position=configs.position("rope"),
            pattern=configs.pattern(name, **values),
        )
        made = configs.build({"model": section}).model
        assert made.pattern == PATTERNS[name](**values)
        written = configs.resolved(made)["pattern"]
        assert configs.take_pattern(written) == made.pattern
    with pytest.raises(ValueError, match="did you mean 'dilation'"):
        configs.take_pattern({"name": "dilated", "knobs": {"width": 3, "dilations": 2}})
    with pytest.raises(ValueError, match="did you mean 'dilated'"):
        configs.pattern("dilate")


START = 2**24


@pytest.mark.parametrize(
    "mask",
    [
        BigBird(3, 1, 2, ()),
        slow(WindowGlobal(2, (START + 7,))),
        slow(Fixed(6, 2)),
    ],
    ids=lambda mask: type(mask).__name__,
)
def test_far_positions_and_gaps_find_every_block(mask):
    # No layout: blocks are found from positions, neither near 0 nor even here.
    length = 48
    position = START + jnp.cumsum(jnp.arange(length) % 3 + 1)[None]
    at = Where(position, jnp.ones_like(position))
    keys = jax.random.split(jax.random.key(0), 3)
    q, k, v = (jax.random.normal(key, (1, length, 2, 4)) for key in keys)
    run = dict(mask=mask, blocks=(4, 4))
    found = attend(NONE, {}, q, k, v, at, at, implementation="blockwise", **run)
    wanted = attend(NONE, {}, q, k, v, at, at, implementation="pairs", **run)
    np.testing.assert_allclose(found, wanted, atol=2e-6)

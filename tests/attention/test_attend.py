"""Attention's own promises: masks, empty rows, errors, memory."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from relpos_jax import where
from relpos_jax.attention import attend, strips
from relpos_jax.attention.attend import _check as check
from relpos_jax.attention.plan import Plan, block_pairs
from relpos_jax.masks import Bidirectional, Causal, Window
from relpos_jax.positional import Dims, PositionEncoding, make, merge
from relpos_jax.relative import Layout
from relpos_jax.where import Where

NONE = PositionEncoding()


def qkv(queries, keys=None, heads=2, head_dim=8, batch=2):
    shapes = [queries, keys or queries, keys or queries]
    return [
        jax.random.normal(key, (batch, length, heads, head_dim))
        for key, length in zip(
            jax.random.split(jax.random.key(0), 3), shapes, strict=True
        )
    ]


@pytest.mark.parametrize("implementation", ["pairs", "dense", "blockwise"])
def test_without_positions_it_is_jax_s_own_attention(implementation):
    q, k, v = qkv(20)
    at = where.contiguous(2, 20)
    found = attend(
        NONE, {}, q, k, v, at, at, layout=Layout(), implementation=implementation
    )
    wanted = jax.nn.dot_product_attention(q, k, v, is_causal=True)
    np.testing.assert_allclose(found, wanted, atol=2e-6)


def test_memory_is_aligned_at_the_end_not_at_the_start():
    # jax.nn.dot_product_attention(is_causal=True) lets query 0 see key 0 only.
    q, k, v = qkv(3, 8)
    k_at = where.contiguous(2, 8)
    q_at = jax.tree.map(lambda x: x[:, 5:], k_at)
    found = attend(NONE, {}, q, k, v, q_at, k_at, layout=Layout(5))
    mask = jnp.arange(8)[None, :] <= 5 + jnp.arange(3)[:, None]
    wanted = jax.nn.dot_product_attention(q, k, v, mask=mask[None, None])
    np.testing.assert_allclose(found, wanted, atol=2e-6)


@pytest.mark.parametrize("width, seen", [(4, [1, 2, 3, 4, 4, 4]), (1, [1] * 6)])
def test_window_counts_its_own_position(width, seen):
    at = where.contiguous(1, 6)
    assert Window(width)(at, at).sum(-1)[0].tolist() == seen
    both = Window(width, causal=False)(at, at)[0]
    assert (both == both.T).all() and both.sum() == 2 * sum(seen) - 6


def test_window_costs_its_band():
    def count(length):
        plan = Plan(NONE, Window(64), 1.0, Layout(), 64, 64)
        near, far = block_pairs(plan, length, length)
        assert not len(far)
        return len(near)

    assert count(256) == 4 + 3 and count(512) == 8 + 7
    causal = Plan(NONE, Causal(), 1.0, Layout(), 64, 64)
    assert len(block_pairs(causal, 256, 256)[0]) == 10
    assert len(block_pairs(causal._replace(layout=None), 256, 256)[0]) == 16


@pytest.mark.parametrize("implementation", ["pairs", "dense", "blockwise"])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
def test_a_row_that_sees_nothing_is_zero_with_zero_gradients(implementation, dtype):
    q, k, v = (x.astype(dtype) for x in qkv(6))
    at = where.contiguous(2, 6)
    at = at._replace(segment=at.segment.at[0].set(0).at[1, 2].set(0))

    def loss(q, k, v):
        out = attend(
            NONE, {}, q, k, v, at, at, layout=Layout(), implementation=implementation
        )
        return jnp.sum(out.astype(jnp.float32) ** 2), out

    gradients, out = jax.grad(loss, argnums=(0, 1, 2), has_aux=True)(q, k, v)
    assert np.all(np.asarray(out[0], np.float32) == 0)
    assert np.all(np.asarray(out[1, 2], np.float32) == 0)
    assert np.any(np.asarray(out[1, 3], np.float32) != 0)
    for gradient in gradients:
        assert np.all(np.asarray(gradient[0], np.float32) == 0)
        assert np.all(np.isfinite(np.asarray(gradient, np.float32)))


@pytest.mark.parametrize("implementation", ["dense", "blockwise"])
def test_a_huge_excluded_logit_changes_nothing(implementation):
    q, k, v = qkv(5)
    at = where.contiguous(2, 5)

    def loss(q, k, v):
        out = attend(
            NONE, {}, q, k, v, at, at, layout=Layout(), implementation=implementation
        )
        return jnp.sum(jnp.sin(out[:, :4]))

    value = jax.value_and_grad(loss, argnums=(0, 1, 2))
    one, other = value(q, k, v), value(q, k.at[:, 4].mul(1e18), v)
    jax.tree.map(lambda x, y: np.testing.assert_allclose(x, y, atol=1e-6), one, other)


def test_a_false_layout_is_an_error_or_not_a_number():
    q, k, v = qkv(6)
    at = where.contiguous(2, 6)
    gap = at._replace(position=at.position.at[1, 3:].add(1))
    with pytest.raises(ValueError, match="pass layout=None"):
        attend(NONE, {}, q, k, v, gap, gap, layout=Layout())

    @jax.jit
    def traced(at):
        return attend(NONE, {}, q, k, v, at, at, layout=Layout())

    out = np.asarray(traced(gap))
    assert np.all(np.isfinite(out[0])) and np.all(np.isnan(out[1]))
    attend(NONE, {}, q, k, v, gap, gap, layout=Layout(unit=False))
    attend(NONE, {}, q, k, v, gap, gap)


def test_errors_name_what_does_not_fit():
    q, k, v = qkv(6)
    at, short = where.contiguous(2, 6), where.contiguous(2, 5)
    # Without the tests' shape checks at the border, which would say it first.
    for inputs, message in [
        ((q, k[:, :, :1], v, at, at, "auto"), "k has shape"),
        ((q, k, v[:, :3], at, at, "auto"), "v has shape"),
        ((q, k, v, short, at, "auto"), "q_at has shape"),
        ((q, k, v, at, short, "auto"), "k_at has shape"),
        ((q, k, v, at, at, "flash"), "implementation must be one of"),
    ]:
        with pytest.raises(ValueError, match=message):
            check(*inputs)
    with pytest.raises(ValueError, match="at least 1"):
        Window(0)


@pytest.mark.parametrize("name", ["alibi", "t5", "shaw", "transformer_xl", "rope"])
def test_blockwise_memory_grows_linearly(name):
    encoding = make(name)
    dims = Dims(2, 16, 32)
    params = merge(
        encoding.init(jax.random.key(0), dims),
        encoding.init_shared(jax.random.key(1), dims),
    )

    def temporaries(length, implementation):
        q, k, v = qkv(length, head_dim=16, batch=1)
        at = where.contiguous(1, length)

        def loss(params, q, k, v):
            return attend(
                encoding,
                params,
                q,
                k,
                v,
                at,
                at,
                layout=Layout(),
                implementation=implementation,
                blocks=(64, 64) if implementation == "blockwise" else None,
            ).sum()

        gradient = jax.jit(jax.grad(loss, argnums=(0, 1, 2, 3)))
        analysis = gradient.lower(params, q, k, v).compile().memory_analysis()
        return analysis.temp_size_in_bytes

    assert temporaries(2048, "blockwise") < 2.2 * temporaries(1024, "blockwise")
    assert temporaries(1024, "blockwise") < 0.25 * temporaries(1024, "dense")


def test_bidirectional_attention_sees_both_sides():
    q, k, v = qkv(6)
    at = Where(*where.from_lengths(jnp.array([6, 4]), 6))
    out = attend(NONE, {}, q, k, v, at, at, mask=Bidirectional(), layout=Layout())
    bias = jnp.where(jnp.arange(6)[None, :] < jnp.array([[6], [4]]), 0, -1e30)
    wanted = jax.nn.dot_product_attention(q, k, v, bias=bias[:, None, None])
    np.testing.assert_allclose(out[0], wanted[0], atol=2e-6)
    np.testing.assert_allclose(out[1, :4], wanted[1, :4], atol=2e-6)


@pytest.mark.parametrize("name", ["alibi", "shaw", "transformer_xl", "xpos"])
@pytest.mark.parametrize("rows", [None, 2])
def test_rows_of_the_batch_by_blocks(name, rows, monkeypatch):
    monkeypatch.setattr(strips, "default_rows", lambda batch, blocks: rows)
    encoding, dims = make(name), Dims(2, 8, 16)
    params = merge(
        encoding.init(jax.random.key(0), dims),
        encoding.init_shared(jax.random.key(1), dims),
    )
    keys = jax.random.split(jax.random.key(2), 3)
    q, k, v = (jax.random.normal(key, (4, 40, 2, 8)) for key in keys)
    # Rows of different lengths, so that none can stand for another.
    at = where.from_lengths(jnp.asarray([40, 33, 17, 8]), 40)

    def loss(params, q, k, v, implementation):
        out = attend(
            encoding,
            params,
            q,
            k,
            v,
            at,
            at,
            layout=Layout(),
            implementation=implementation,
            blocks=(16, 8) if implementation == "blockwise" else None,
            dropout=0.2,
            key=jax.random.key(3),
        )
        return jnp.sum(jnp.sin(out))

    run = jax.value_and_grad(loss, argnums=(0, 1, 2, 3))
    found, wanted = run(params, q, k, v, "blockwise"), run(params, q, k, v, "dense")
    for one, other in zip(*map(jax.tree.leaves, (found, wanted)), strict=True):
        np.testing.assert_allclose(one, other, rtol=1e-3, atol=2e-5)


def test_a_block_has_few_rows_of_the_batch_but_all_of_a_mesh_s():
    assert strips.default_rows(4, (512, 256)) == 1
    assert strips.default_rows(96, (128, 128)) == 8  # so that none is small
    assert strips.default_rows(3, (16, 16)) == 3
    with jax.set_mesh(jax.make_mesh((1,), ("data",))):
        assert strips.default_rows(4, (512, 256)) is None

"""The platform's fused kernel against the plain formula, and where it is refused."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from relpos_jax import where
from relpos_jax.attention import attend, fused
from relpos_jax.masks import Bidirectional, Causal, Window
from relpos_jax.positional import Dims, PositionEncoding, make, merge
from relpos_jax.relative import Layout

LENGTH, HEADS, WIDTH = 24, 2, 8
NONE = PositionEncoding()


def output_and_gradients(encoding, at, implementation, **options):
    keys = jax.random.split(jax.random.key(0), 5)
    dims = Dims(HEADS, WIDTH, HEADS * WIDTH)
    params = merge(encoding.init(keys[3], dims), encoding.init_shared(keys[4], dims))
    shape = (2, LENGTH, HEADS, WIDTH)
    inputs = [jax.random.normal(key, shape) for key in keys[:3]]

    def loss(q, k, v):
        run = {"layout": Layout(), "implementation": implementation, **options}
        out = attend(encoding, params, q, k, v, at, at, **run)
        return jnp.sum(jnp.sin(out)), out

    return jax.jit(jax.grad(loss, argnums=(0, 1, 2), has_aux=True))(*inputs)


@pytest.mark.parametrize("name", ["none", "rope", "rope_partial", "sinusoidal"])
@pytest.mark.parametrize(
    "mask", [Causal(), Window(5), Bidirectional(), Window(3, causal=False)], ids=repr
)
def test_it_is_the_plain_formula(name, mask):
    encoding, at = make(name), where.contiguous(2, LENGTH, start=7)
    found = output_and_gradients(encoding, at, "fused", mask=mask)
    wanted = output_and_gradients(encoding, at, "pairs", mask=mask)
    for one, other in zip(*map(jax.tree.leaves, (found, wanted)), strict=True):
        np.testing.assert_allclose(one, other, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize(
    "at",
    [
        where.from_lengths(jnp.asarray([LENGTH, 9]), LENGTH),
        where.Where(*(jnp.tile(x, (2, 1)) for x in where.packed((10, 14), LENGTH))),
    ],
    ids=["padding", "documents"],
)
def test_documents_and_padding_go_block_by_block(at):
    found = output_and_gradients(make("rope"), at, "fused")
    wanted = output_and_gradients(make("rope"), at, "pairs")
    for one, other in zip(*map(jax.tree.leaves, (found, wanted)), strict=True):
        np.testing.assert_allclose(one, other, rtol=1e-4, atol=1e-5)


def test_nothing_of_pairs_is_kept_for_one_document():
    """What is chosen is known when the program runs: one branch, not both."""
    at = where.contiguous(2, LENGTH)
    ran = []

    def otherwise():
        jax.debug.callback(lambda: ran.append(True))
        return jnp.zeros((2, LENGTH, HEADS, WIDTH))

    x = jnp.ones((2, LENGTH, HEADS, WIDTH))
    operands = fused.Operands(x, x, x, None, None, None, {})
    out = fused.attend_fused(Causal(), 1.0, operands, at, at, otherwise)
    jax.block_until_ready(out)
    jax.effects_barrier()
    assert not ran
    np.testing.assert_allclose(out, x, rtol=1e-6)


@pytest.mark.parametrize(
    "name, change, message",
    [
        ("alibi", {}, "Alibi changes more"),
        ("transformer_xl", {}, "changes more"),
        ("rope", {"layout": None}, "unit spacing"),
        ("rope", {"layout": Layout(unit=False)}, "unit spacing"),
        ("rope", {"dropout": 0.1, "key": jax.random.key(0)}, "dropout"),
    ],
)
def test_it_is_refused_where_it_is_not_exact(name, change, message):
    with pytest.raises(ValueError, match=message):
        output_and_gradients(make(name), where.contiguous(2, LENGTH), "fused", **change)


def test_cudnn_is_asked_for_on_gpu_in_half_precision_only(monkeypatch):
    assert fused.kernel(Causal(), 64, jnp.bfloat16) == "xla"
    monkeypatch.setattr(jax, "default_backend", lambda: "gpu")
    assert fused.kernel(Causal(), 64, jnp.bfloat16) == "cudnn"
    assert fused.kernel(Causal(), 64, jnp.float32) == "xla"
    assert fused.kernel(Causal(), 60, jnp.bfloat16) == "xla"
    assert fused.kernel(Window(5), 64, jnp.bfloat16) == "cudnn"
    assert fused.kernel(Window(5, causal=False), 64, jnp.bfloat16) == "xla"

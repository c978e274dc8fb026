"""Adapter of CoPE's case: x-transformers' CoPE and the paper's definition in loops."""

import jax.numpy as jnp

from relpos_jax import where
from relpos_jax.attention import attend
from relpos_jax.interop.parity.cases import Case, covers
from relpos_jax.masks import Causal
from relpos_jax.positional.cope import Cope, contextual_positions, gates, interpolate


@covers(arrays=("w.pos_emb", "out.cope_bias"), config=("max_pos",))
def cope(case: Case):
    """Yields positions, biases, weights and the attention's output."""
    q, k, v = (case[f"in.{name}"] for name in "qkv")
    (batch, _, length, dim), table = q.shape, case["w.pos_emb"]
    encoding = Cope(max_position=case.config["max_pos"])
    at = where.contiguous(batch, length)
    visible = Causal()(at, at)[:, None]
    # The formula's functions, with the table that the heads share.
    logits = encoding.scale(dim) * jnp.einsum("bhqd,bhkd->bhqk", q, k)
    position = contextual_positions(gates(logits, visible))
    bias = interpolate(jnp.einsum("bhqd,pd->bhqp", q, table), position)
    below = jnp.where(visible, bias, 0.0)
    yield "out.cope_bias", bias, case["out.cope_bias"]
    if "aux.cope_bias_float64" in case:
        yield "aux.cope_bias_float64", below, case["aux.cope_bias_float64"]
    if "aux.positions_float64" in case:
        clamped = jnp.minimum(position, encoding.max_position - 1)
        clamped = jnp.where(visible, clamped, 0.0)
        yield "aux.positions_float64", clamped, case["aux.positions_float64"]
    # The whole, through `attend`; values of one place each give the weights.
    params = {"table": table[None]}
    q, k, v = (jnp.swapaxes(x, 1, 2) for x in (q, k, v))
    out = attend(encoding, params, q, k, v, at, at)
    yield "out.context", jnp.swapaxes(out, 1, 2), case["out.context"]
    ones = jnp.broadcast_to(jnp.eye(length)[None, :, None, :], (*v.shape[:3], length))
    weights = attend(encoding, params, q, k, ones, at, at)
    expected = case["out.attention_probs"]
    yield "out.attention_probs", jnp.swapaxes(weights, 1, 2), expected

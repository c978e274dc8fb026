"""Transformer-XL: the relative shift, its sinusoid, its attention; Conformer's."""

import jax.numpy as jnp
import numpy as np

from relpos_jax import where
from relpos_jax.attention import attend
from relpos_jax.interop.parity.cases import Case, covers
from relpos_jax.interop.parity.common import join_heads, probabilities, split_heads
from relpos_jax.masks import Bidirectional, Causal
from relpos_jax.positional.sinusoidal import sinusoid
from relpos_jax.positional.transformer_xl import TransformerXLRelative
from relpos_jax.relative import Diagonals, descending
from relpos_jax.skew import shift


@covers("txl", source="_rel_shift", arrays=("in.x_*", "out.x_*"))
def relative_shift(case: Case):
    for name in case.names("in.x_*"):
        x = jnp.moveaxis(case[name], (0, 1), (2, 3))
        queries, keys = x.shape[2:]
        # The source has no columns for negative distances; ours are masked later.
        ours = shift(jnp.pad(x, [(0, 0)] * 3 + [(0, queries - 1)]))
        ours = np.asarray(jnp.moveaxis(ours, (2, 3), (0, 1)))
        out = name.replace("in.", "out.", 1)
        distance = np.arange(queries)[:, None] + keys - queries - np.arange(keys)
        causal = (distance >= 0)[:, :, None, None]
        yield out, np.where(causal, ours, 0), np.where(causal, case.arrays[out], 0)


@covers("txl", arrays=("in.pos_seq_*", "out.emb_*"))
def sinusoids(case: Case):
    near, far = case.tolerance(), case.tolerance("position above")
    for name in case.names("out.emb_*"):
        words = name.removeprefix("out.emb_").split("_")
        key = next(
            found
            for found in case.names("in.pos_seq_*")
            if set(found.removeprefix("in.pos_seq_").split("_")) <= set(words)
        )
        position = case[key]
        ours = sinusoid(position, case.arrays[name].shape[1])
        grown = np.asarray(position)[:, None] * far.absolute
        allowed = np.where(np.asarray(position)[:, None] < 100, near.absolute, grown)
        yield name, ours, case[name], allowed


def layer_norm(x, scale, offset):
    """Returns the normalised features, with the sources' epsilon."""
    centred = x - x.mean(axis=-1, keepdims=True)
    spread = jnp.sqrt((centred**2).mean(axis=-1, keepdims=True) + 1e-5)
    shape = (1,) * (x.ndim - 1) + scale.shape
    return centred / spread * scale.reshape(shape) + offset.reshape(shape)


def kernel(weight, heads):
    """Returns a torch weight `[h d, w]` as `[w h d]`."""
    return weight.T.reshape(weight.shape[1], heads, -1)


@covers("txl", arrays=("w.qkv_net.weight", "w.r_net.weight", "in.w", "in.attn_mask"))
def attention(case: Case):
    heads, pre = case.config["n_head"], case.config["pre_lnorm"]
    # Time comes first in the source.
    new = jnp.swapaxes(case["in.w"], 0, 1)
    old = jnp.zeros((new.shape[0], 0, new.shape[2]))
    if "in.mems" in case:
        old = jnp.swapaxes(case["in.mems"], 0, 1)
    states = jnp.concatenate([old, new], axis=1)

    def norm(x):
        return layer_norm(x, case["w.layer_norm.weight"], case["w.layer_norm.bias"])

    projected = case.linear("qkv_net", norm(states) if pre else states)
    q, k, v = (split_heads(x, heads) for x in jnp.split(projected, 3, axis=-1))
    q = q[:, old.shape[1] :]
    xl = TransformerXLRelative()
    params = {
        "content_bias": case["in.r_w_bias"],
        "position_bias": case["in.r_r_bias"],
        "projection": kernel(case["w.r_net.weight"], heads),
    }
    k_at = where.contiguous(*states.shape[:2])
    q_at = where.contiguous(*new.shape[:2], start=old.shape[1])
    mask = Causal()
    if not bool((mask(q_at, k_at)[0] == ~case["in.attn_mask"]).all()):
        raise ValueError("in.attn_mask is not causal")
    out = attend(xl, params, q, k, v, q_at, k_at, mask=mask)
    out = new + case.linear("o_net", join_heads(out))
    out = out if pre else norm(out)
    yield "out.y", jnp.swapaxes(out, 0, 1), case["out.y"]
    weights = probabilities(xl, params, q, k, q_at, k_at, mask)
    weights = jnp.moveaxis(weights, (2, 3), (0, 1))
    yield "out.attn_prob", weights, case["out.attn_prob"]
    queries, keys = q.shape[1], k.shape[1]
    waves = sinusoid(descending(keys - 1, keys), new.shape[2])
    yield "in.r", waves, case["in.r"]
    if "aux.BD_shifted" in case:
        rows = xl.table(params, descending(keys - 1, queries + keys - 1))
        turned = jnp.moveaxis(q + case["in.r_r_bias"][None, None], 1, 2)
        relative = Diagonals(queries, keys).query_dot(turned, jnp.swapaxes(rows, 0, 1))
        relative = jnp.where(mask(q_at, k_at)[:, None], relative, 0)
        relative = jnp.moveaxis(relative, (2, 3), (0, 1))
        yield "aux.BD_shifted", relative, case["aux.BD_shifted"]


@covers(arrays=("w.pos_bias_u", "w.linear_pos.weight", "in.hidden_states"))
def conformer(case: Case):
    x, heads = case["in.hidden_states"], case.config["num_heads"]
    q, k, v = (split_heads(case.linear(f"linear_{name}", x), heads) for name in "qkv")
    # Its sinusoid interleaves sines and cosines; ours has all sines first, so the
    # projection's input features change places.
    width = x.shape[2]
    order = np.r_[0:width:2, 1:width:2]
    params = {
        "content_bias": case["w.pos_bias_u"],
        "position_bias": case["w.pos_bias_v"],
        "projection": kernel(case["w.linear_pos.weight"], heads)[order],
    }
    xl, mask = TransformerXLRelative(), Bidirectional()
    at = where.contiguous(*x.shape[:2])
    out = attend(xl, params, q, k, v, at, at, mask=mask)
    out = case.linear("linear_out", join_heads(out))
    yield "out.hidden_states", out, case["out.hidden_states"]
    weights = probabilities(xl, params, q, k, at, at, mask)
    yield "out.attention_probs", weights, case["out.attention_probs"]
    if "in.relative_position_embeddings" in case:
        rows = descending(x.shape[1] - 1, 2 * x.shape[1] - 1)
        waves = sinusoid(rows, width, layout="interleaved")[None]
        name = "in.relative_position_embeddings"
        yield name, waves, case[name]

"""ALiBi: slopes, biases, and BLOOM's attention layer."""

import jax.numpy as jnp
import numpy as np

from relpos_jax import where
from relpos_jax.attention import attend
from relpos_jax.interop.parity.cases import Case, covers
from relpos_jax.interop.parity.common import (
    bias,
    constants,
    join_heads,
    probabilities,
)
from relpos_jax.masks import Causal
from relpos_jax.positional.alibi import Alibi, slopes
from relpos_jax.where import Where


@covers("alibi", arrays=("out.*_h*",), config=("num_heads",))
def head_slopes(case: Case):
    for name in case.names("out.*_h*"):
        ours = slopes(int(name.rpartition("_h")[2]))
        tolerance = case.tolerance()
        if name.startswith("out.bloom"):
            # BLOOM raises a float32 base to powers, so its own slopes are off by 3e-7
            # of their value; the authors' are in double precision.
            tolerance = tolerance.relative
        yield name, ours, case[name], tolerance


def bloom_places(mask) -> Where:
    """Returns BLOOM's positions: real tokens count from 0, padding stands nowhere."""
    mask = jnp.asarray(mask, jnp.int32)
    return Where((jnp.cumsum(mask, axis=1) - 1) * mask, mask)


def bloom_bias(heads: int, at: Where):
    """Returns BLOOM's bias `slope * j`, which is ours of distance -j turned around."""
    alibi = Alibi(symmetric=True)
    table = alibi.table(constants(alibi, heads), at.position)
    return -jnp.moveaxis(table, -1, 1)[:, :, None, :]


@covers("alibi", arrays=("out.neox", "out.symmetric"))
def tensors(case: Case):
    heads, queries, keys = case.arrays["out.neox"].shape
    at = where.contiguous(1, keys)
    causal, symmetric = Alibi(), Alibi(symmetric=True)
    params = constants(causal, heads)
    wanted = {
        "out.neox": causal,
        "out.neox_last_query": causal,
        "out.symmetric": symmetric,
        "out.symmetric_offset": symmetric,
    }
    for name, encoding in wanted.items():
        if name in case:
            queries = case.arrays[name].shape[1]
            last = where.contiguous(1, queries, start=keys - queries)
            yield name, bias(encoding, params, last, at), case[name]
    if "out.bloom" in case:
        ours = bloom_bias(heads, bloom_places(case["in.attention_mask"]))
        yield "out.bloom", ours, case["out.bloom"]


@covers("alibi", arrays=("w.query_key_value.weight", "in.attention_mask"))
def bloom_attention(case: Case):
    x, heads = case["in.hidden_states"], case.config["num_heads"]
    # The fused projection holds queries, keys and values of each head side by side.
    fused = case.linear("query_key_value", x).reshape(*x.shape[:2], heads, 3, -1)
    q, k, v = (fused[:, :, :, i] for i in range(3))
    at = bloom_places(case["in.attention_mask"])
    alibi, params = Alibi(), {}
    out = attend(alibi, params, q, k, v, at, at, mask=Causal())
    out = case.linear("dense", join_heads(out)) + case["in.residual"]
    weights = probabilities(alibi, params, q, k, at, at, Causal())
    # Queries in the padding give zeros here and nothing that means anything there.
    real = np.asarray(at.segment) != 0
    pairs = [
        ("out.hidden_states", out, real[:, :, None]),
        ("out.attention_probs", weights, real[:, None, :, None]),
    ]
    for name, ours, real in pairs:
        expected = case.arrays[name]
        yield name, np.where(real, ours, 0), np.where(real, expected, 0)
    if "in.alibi" in case:
        yield "in.alibi", bloom_bias(heads, at), case["in.alibi"]

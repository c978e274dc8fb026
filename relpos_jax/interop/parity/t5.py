"""T5: buckets, bias, and its attention layer (Hugging Face transformers)."""

import re

import jax
import jax.numpy as jnp
import numpy as np

from relpos_jax import where
from relpos_jax.attention import attend
from relpos_jax.interop.parity.cases import Case, covers
from relpos_jax.interop.parity.common import (
    bias,
    join_heads,
    places,
    probabilities,
    split_heads,
)
from relpos_jax.masks import Bidirectional, Causal
from relpos_jax.positional.t5 import T5, relative_position_bucket


@covers("t5", arrays=("in.relative_position", "out.*_nb*_md*"))
def bucket(case: Case):
    # The source counts key minus query.
    distance = -case["in.relative_position"]
    for name in case.names("out.*_nb*_md*"):
        kind, direction, buckets, far = re.fullmatch(
            r"out\.(\w+?)_(bidirectional|causal)_nb(\d+)_md(\d+)", name
        ).groups()
        ours = relative_position_bucket(
            distance,
            buckets=int(buckets),
            max_distance=int(far),
            bidirectional=direction == "bidirectional",
        )
        expected = case.arrays[name]
        differs = name.replace("out.bucket", "aux.differs")
        if kind == "bucket" and differs in case:
            # Where the source's float32 logarithm falls on the other side of an edge.
            at_edge = np.isin(case.arrays["in.relative_position"], case.arrays[differs])
            expected = np.where(at_edge, ours, expected)
        yield name, ours, expected


def encoding(case: Case) -> tuple[T5, dict]:
    """Returns the case's encoding and its table."""
    config = case.config
    prefix = "" if "num_buckets" in config else "relative_attention_"
    made = T5(
        buckets=config[f"{prefix}num_buckets"],
        max_distance=config[f"{prefix}max_distance"],
        bidirectional=config["bidirectional"],
    )
    return made, {"table": case["w.relative_attention_bias.weight"]}


@covers("t5", arrays=("out.bias", "w.relative_attention_bias.weight"))
def position_bias(case: Case):
    queries, keys = case.arrays["out.bias"].shape[1:]
    k_at = where.contiguous(1, keys)
    yield (
        "out.bias",
        bias(*encoding(case), where.contiguous(1, queries), k_at),
        case["out.bias"],
    )
    if "out.bias_cached" in case:
        position = case["in.cache_position"][None]
        q_at = where.Where(position, jnp.ones_like(position))
        ours = bias(*encoding(case), q_at, k_at)
        yield "out.bias_cached", ours, case["out.bias_cached"]


@covers("t5", arrays=("in.hidden_states", "out.hidden_states", "w.q.weight"))
def attention(case: Case):
    t5, params = encoding(case)
    mask = Bidirectional() if t5.bidirectional else Causal()
    x = case["in.hidden_states"]
    heads = case.config["num_heads"]
    q, k, v = (split_heads(case.linear(name, x), heads) for name in "qkv")
    keep = jnp.ones(x.shape[:2], bool)
    if "in.key_keep" in case:
        keep = case["in.key_keep"]
    q_at, k_at = places(keep)
    out = attend(t5, params, q, k, v, q_at, k_at, mask=mask)
    yield (
        "out.hidden_states",
        case.linear("o", join_heads(out)),
        case["out.hidden_states"],
    )
    yield (
        "out.attention_probs",
        probabilities(t5, params, q, k, q_at, k_at, mask),
        case["out.attention_probs"],
    )
    if "out.position_bias_plus_mask" in case:
        ours = bias(t5, params, q_at, k_at)
        ours = jnp.where(keep[0][None, None, :], ours, -1e9)
        yield "out.position_bias_plus_mask", ours, case["out.position_bias_plus_mask"]
    if "out.hidden_states_cached" in case:
        length = x.shape[1]

        @jax.jit
        def step(t):
            def now(a):
                return jax.lax.dynamic_slice_in_dim(a, t, 1, axis=1)

            # Slots that are not written yet are empty.
            slots = k_at._replace(segment=jnp.where(k_at.position <= t, 1, 0))
            here = jax.tree.map(now, q_at)
            return attend(t5, params, now(q), k, v, here, slots, mask=mask)

        out = jnp.concatenate([step(t) for t in range(length)], axis=1)
        ours = case.linear("o", join_heads(out))
        yield "out.hidden_states_cached", ours, case["out.hidden_states_cached"]
    if "out.position_bias_last_step" in case:
        last = jax.tree.map(lambda a: a[:, -1:], q_at)
        ours = bias(t5, params, last, k_at)
        yield "out.position_bias_last_step", ours, case["out.position_bias_last_step"]

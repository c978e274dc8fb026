"""DeBERTa v1, v2 and v3: log buckets and disentangled attention (transformers)."""

import re

import jax
import jax.numpy as jnp
import numpy as np

from relpos_jax import where
from relpos_jax.attention import attend, core
from relpos_jax.interop.parity.cases import Case, covers
from relpos_jax.interop.parity.common import join_heads, probabilities, split_heads
from relpos_jax.masks import Bidirectional
from relpos_jax.positional.deberta import Deberta, log_bucket


@covers("deberta", arrays=("in.relative_pos", "out.bucket_b*_m*"))
def buckets(case: Case):
    distance = case["in.relative_pos"]
    for name in case.names("out.bucket_b*_m*"):
        buckets, far = map(
            int, re.fullmatch(r"out\.bucket_b(\d+)_m(\d+)", name).groups()
        )
        ours = log_bucket(distance, buckets=buckets, max_position=far)
        expected, suffix = case.arrays[name], f"b{buckets}_m{far}"
        near = f"aux.near_integer_{suffix}"
        if near in case:
            # There the source's float32 logarithm may fall on either side of an edge.
            edge = np.isin(case.arrays["in.relative_pos"], case.arrays[near])
            expected = np.where(edge, ours, expected)
        yield name, ours, expected
        if f"aux.float64_{suffix}" in case:
            yield f"aux.float64_{suffix}", ours, case[f"aux.float64_{suffix}"]


def projection(case: Case, name: str, heads: int) -> tuple[jax.Array, jax.Array | None]:
    """Returns a torch projection as our kernel `[w h d]` and bias `[h d]`."""
    weight = case[f"w.{name}.weight"].T
    kernel = weight.reshape(weight.shape[0], heads, -1)
    bias = f"w.{name}.bias"
    return kernel, case[bias].reshape(heads, -1) if bias in case else None


def encoding(case: Case, names: dict[str, str]) -> tuple[Deberta, dict]:
    """Returns the encoding and its parameters; `names` of the source's projections."""
    config = case.config
    deberta = Deberta(
        span=config["max_relative_positions"],
        buckets=config.get("position_buckets", 0),
        terms=tuple(config["pos_att_type"]),
    )
    params = {"embeddings": case["in.rel_embeddings"]}
    for ours, name in names.items():
        if f"w.{name}.weight" in case:
            kernel, bias = projection(case, name, config["num_heads"])
            params[ours] = kernel
            if bias is not None:
                params[f"{ours}_bias"] = bias
    return deberta, params


def places(case: Case):
    """Returns where queries and keys stand, from the mask of pairs."""
    mask = case["in.mask"][:, 0]
    keep = mask.any(axis=1)
    at = where.contiguous(*keep.shape)
    at = at._replace(segment=keep.astype(jnp.int32))
    if not bool((Bidirectional()(at, at) == mask).all()):
        raise ValueError("in.mask is not the outer product of padding with itself")
    return at


def compare(case: Case, name: str, ours, real):
    """Yields a comparison of the queries that see something.

    In the source, a query in the padding weighs all keys alike; ours gives zeros.
    """
    expected = case.arrays[name]
    return name, np.where(real, ours, 0), np.where(real, expected, 0)


@covers("deberta", arrays=("w.query_proj.weight", "in.mask"), config=("share_att_key",))
def version_2(case: Case):
    x, heads = case["in.hidden_states"], case.config["num_heads"]
    q, k, v = (
        split_heads(case.linear(f"{name}_proj", x), heads)
        for name in ("query", "key", "value")
    )
    shared = case.config["share_att_key"]
    names = {"key": "key_proj", "query": "query_proj"}
    if not shared:
        names = {ours: f"pos_{name}" for ours, name in names.items()}
    deberta, params = encoding(case, names)
    at = places(case)
    real = np.asarray(at.segment) != 0
    out = attend(deberta, params, q, k, v, at, at, mask=Bidirectional())
    yield compare(case, "out.context", join_heads(out), real[:, :, None])
    weights = probabilities(deberta, params, q, k, at, at, Bidirectional())
    yield compare(case, "out.attention_probs", weights, real[:, None, :, None])
    if "out.relative_pos" in case:
        distance = jnp.arange(x.shape[1])[:, None] - jnp.arange(x.shape[1])[None, :]
        if deberta.buckets:
            distance = log_bucket(
                distance, buckets=deberta.buckets, max_position=deberta.span
            )
        yield "out.relative_pos", distance, case["out.relative_pos"]


@covers("deberta", arrays=("w.in_proj.weight", "w.q_bias", "w.v_bias", "in.mask"))
def version_1(case: Case):
    x, heads = case["in.hidden_states"], case.config["num_heads"]
    # Each head's rows are its queries, keys and values; only keys have no bias.
    fused = case.linear("in_proj", x).reshape(*x.shape[:2], heads, 3, -1)
    q, k, v = (fused[:, :, :, i] for i in range(3))
    q, v = (
        a + case[f"w.{name}"].reshape(1, 1, heads, -1)
        for a, name in ((q, "q_bias"), (v, "v_bias"))
    )
    deberta, params = encoding(case, {"key": "pos_proj", "query": "pos_q_proj"})
    at = places(case)
    real = np.asarray(at.segment) != 0
    if case.config.get("talking_head"):
        # Heads mix before the mask and after the softmax: not a matter of position.
        weights = talking_heads(case, deberta, params, q, k, at)
        out = jnp.einsum("bhqk,bkhd->bqhd", weights, v)
    else:
        weights = probabilities(deberta, params, q, k, at, at, Bidirectional())
        out = attend(deberta, params, q, k, v, at, at, mask=Bidirectional())
    yield compare(case, "out.context", join_heads(out), real[:, :, None])
    yield compare(case, "out.attention_probs", weights, real[:, None, :, None])


def talking_heads(case: Case, deberta: Deberta, params: dict, q, k, at):
    """Returns weights whose heads are mixed before the mask and behind the softmax."""
    visible = Bidirectional()(at, at)[:, None]
    q, k = jnp.swapaxes(q, 1, 2), jnp.swapaxes(k, 1, 2)
    operands = core.Operands(q, k, k, None, None, None, params)
    scale = deberta.scale(q.shape[-1])
    logits = core.logits_of(deberta, operands, at, at, scale, visible)

    def mix(name, x):
        return jnp.einsum("bhqk,gh->bgqk", x, case[f"w.{name}.weight"])

    logits = jnp.where(visible, mix("head_logits_proj", logits), core.NEVER)
    weights = jnp.where(visible, jax.nn.softmax(logits, axis=-1), 0.0)
    return mix("head_weights_proj", weights)

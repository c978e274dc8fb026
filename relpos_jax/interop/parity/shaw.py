"""Shaw: tensor2tensor (the authors'), OpenNMT-py, BERT and Wav2Vec2-BERT."""

import dataclasses

import jax.numpy as jnp

from relpos_jax import where
from relpos_jax.attention import attend
from relpos_jax.interop.parity.cases import Case, covers
from relpos_jax.interop.parity.common import (
    join_heads,
    places,
    probabilities,
    split_heads,
)
from relpos_jax.masks import Bidirectional, Causal
from relpos_jax.positional.shaw import Shaw


def table(rows):
    """Returns a table that heads share, `[2 clip + 1, 1, d]`."""
    return rows[:, None, :]


def weights_of(shaw: Shaw, params, *operands):
    """Returns attention weights, which the value table does not change."""
    shaw = dataclasses.replace(shaw, values=False)
    return probabilities(shaw, params, *operands)


@covers("shaw", arrays=("w.relative_positions_keys", "in.q", "in.bias"))
def tensor2tensor(case: Case):
    depth = case.config["depth"]
    # The queries come divided by sqrt(depth) already; ours do that themselves.
    q, k, v = (jnp.swapaxes(case[f"in.{name}"], 1, 2) for name in "qkv")
    q = q * depth**0.5
    shaw = Shaw(clip=case.config["max_relative_position"])
    params = {
        "key": table(case["w.relative_positions_keys"]),
        "value": table(case["w.relative_positions_values"]),
    }
    batch, queries, keys = *q.shape[:2], k.shape[1]
    q_at = where.contiguous(batch, queries, start=keys - queries)
    k_at = where.contiguous(batch, keys)
    mask = Causal() if case.config["causal"] else Bidirectional()
    out = jnp.swapaxes(attend(shaw, params, q, k, v, q_at, k_at, mask=mask), 1, 2)
    yield "out.y", out, case["out.y"]
    if "aux.y_float64_loops" in case:
        yield "aux.y_float64_loops", out, case["aux.y_float64_loops"]
    weights = weights_of(shaw, params, q, k, q_at, k_at, mask)
    yield "out.attention_probs", weights, case["out.attention_probs"]


@covers("shaw", arrays=("w.relative_positions_embeddings.weight", "in.x"))
def opennmt(case: Case):
    x, heads = case["in.x"], case.config["num_heads"]
    q, k, v = (
        split_heads(case.linear(f"linear_{name}", x), heads)
        for name in ("query", "keys", "values")
    )
    # One table for keys and values alike.
    rows = table(case["w.relative_positions_embeddings.weight"])
    shaw = Shaw(clip=case.config["max_relative_positions"])
    params = {"key": rows, "value": rows}
    mask = Causal() if case.config["causal"] else Bidirectional()
    # A key that every query finds blocked is padding.
    q_at, k_at = places(~case["in.mask"][:, 0].all(axis=1))
    if not bool((mask(q_at, k_at) == ~case["in.mask"][:, 0]).all()):
        raise ValueError("in.mask is neither padding nor causality")
    out = attend(shaw, params, q, k, v, q_at, k_at, mask=mask)
    yield "out.y", case.linear("final_linear", join_heads(out)), case["out.y"]
    weights = weights_of(shaw, params, q, k, q_at, k_at, mask)
    yield "out.attention_probs", weights, case["out.attention_probs"]


@covers("shaw", source="bert/modeling_bert.py", arrays=("w.distance_embedding.weight",))
def bert(case: Case):
    x, heads = case["in.hidden_states"], case.config["num_heads"]
    q, k, v = (
        split_heads(case.linear(name, x), heads) for name in ("query", "key", "value")
    )
    # BERT counts query minus key and has a row for every distance.
    rows = case["w.distance_embedding.weight"][::-1]
    shaw = Shaw(
        clip=len(rows) // 2,
        values=False,
        key_query="relative_key_query" in case.meta["source"],
    )
    params = {"key": table(rows)}
    q_at, k_at = places(case["in.key_keep"])
    mask = Bidirectional()
    out = attend(shaw, params, q, k, v, q_at, k_at, mask=mask)
    yield "out.context", join_heads(out), case["out.context"]
    weights = weights_of(shaw, params, q, k, q_at, k_at, mask)
    yield "out.attention_probs", weights, case["out.attention_probs"]


@covers("shaw", arrays=("w.distance_embedding.weight",), config=("left_max",))
def wav2vec2_bert(case: Case):
    x, heads = case["in.hidden_states"], case.config["num_heads"]
    q, k, v = (split_heads(case.linear(f"linear_{name}", x), heads) for name in "qkv")
    # Both sides clip at a distance of their own: rows repeat on the shorter side.
    left, right = case.config["left_max"], case.config["right_max"]
    clip = max(left, right)
    row = jnp.clip(jnp.arange(-clip, clip + 1), -left, right) + left
    shaw = Shaw(clip=clip, values=False)
    params = {"key": table(case["w.distance_embedding.weight"][row])}
    at = where.contiguous(*x.shape[:2])
    mask = Bidirectional()
    out = attend(shaw, params, q, k, v, at, at, mask=mask)
    out = case.linear("linear_out", join_heads(out))
    yield "out.hidden_states", out, case["out.hidden_states"]
    weights = weights_of(shaw, params, q, k, at, at, mask)
    yield "out.attention_probs", weights, case["out.attention_probs"]

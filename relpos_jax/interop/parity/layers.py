"""Attention cases once more, through the layer that our models are made of.

The other adapters give the sources' queries, keys and values to `attend`; these map the
sources' weights to parameters of `models.attention.Attention` and give it their inputs.
"""

import dataclasses
from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from relpos_jax import where
from relpos_jax.interop.parity import deberta, t5
from relpos_jax.interop.parity.cases import Case, covers
from relpos_jax.interop.parity.transformer_xl import kernel as split_kernel
from relpos_jax.memory import KeyValueCache, SegmentMemory
from relpos_jax.models import ModelConfig
from relpos_jax.models.attention import Attention
from relpos_jax.positional import Params, PositionEncoding
from relpos_jax.positional.transformer_xl import TransformerXLRelative
from relpos_jax.relative import Layout

Projections = Mapping[str, tuple[jax.Array, jax.Array | None]]


def layer(
    encoding: PositionEncoding,
    projections: Projections,
    own: Params,
    *,
    bidirectional: bool,
) -> Attention:
    """Returns our attention layer with given parameters.

    Args:
      encoding: its position encoding.
      projections: "query", "key" and "value" with kernels `[w h d]` and biases `[h d]`
        or None, and "output" with `[h d w]` and `[w]` or None.
      own: the encoding's parameters that are a layer's own.
      bidirectional: whether it looks ahead.
    """
    width, heads, head_dim = projections["query"][0].shape
    biases = [bias is not None for _, bias in projections.values()]
    config = ModelConfig(
        vocabulary=1,
        layers=1,
        width=width,
        heads=heads,
        head_dim=head_dim,
        feedforward=1,
        position=encoding,
        attention_bias=any(biases),
        bidirectional=bidirectional,
    )
    made = nnx.eval_shape(lambda: Attention(config, key=jax.random.key(0)))
    graphdef, state = nnx.split(made)
    values: dict[str, Any] = {"position": own} if own else {}
    for name, (weights, bias) in projections.items():
        values[name] = {"kernel": weights}
        if any(biases):
            last = weights.shape[-1:] if name == "output" else weights.shape[-2:]
            values[name]["bias"] = jnp.zeros(last) if bias is None else bias
    nnx.replace_by_pure_dict(state, values)
    return nnx.merge(graphdef, state)


def identity(heads: int, head_dim: int) -> tuple[jax.Array, None]:
    """Returns an output projection that joins heads and does nothing else."""
    return jnp.eye(heads * head_dim).reshape(heads, head_dim, -1), None


def run(attention: Attention, x: jax.Array, at: where.Where, shared: Params):
    """Returns the layer's output for a whole sequence."""
    memory = SegmentMemory.empty(1, x.shape[0], 0, x.shape[2])
    return attention(x, at, memory, 0, shared, lambda x: x, Layout())[0]


def output(case: Case, name: str, heads: int) -> tuple[jax.Array, jax.Array | None]:
    """Returns a torch output projection as our kernel `[h d w]` and bias `[w]`."""
    weight, bias = case[f"w.{name}.weight"].T, f"w.{name}.bias"
    return weight.reshape(heads, -1, weight.shape[1]), (
        case[bias] if bias in case else None
    )


@covers("t5", arrays=("in.hidden_states", "out.hidden_states", "w.q.weight"))
def t5_layer(case: Case):
    encoding, shared = t5.encoding(case)
    heads, x = case.config["num_heads"], case["in.hidden_states"]
    names = {"query": "q", "key": "k", "value": "v"}
    projections = {
        ours: deberta.projection(case, name, heads) for ours, name in names.items()
    }
    projections["output"] = output(case, "o", heads)
    attention = layer(encoding, projections, {}, bidirectional=encoding.bidirectional)
    keep = case["in.key_keep"] if "in.key_keep" in case else jnp.ones(x.shape[:2], bool)
    at = where.contiguous(*keep.shape)._replace(segment=keep.astype(jnp.int32))
    # The source masks keys only; our padding asks nothing and gets nothing.
    real = np.asarray(keep)[:, :, None]
    ours = run(attention, x, at, shared)
    yield deberta.compare(case, "out.hidden_states", ours, real)
    if "out.hidden_states_cached" not in case:
        return
    config = attention.config
    sizes = (config.layers, x.shape[0], x.shape[1], config.heads, config.head_dim)

    @jax.jit
    def step(cache, x, at):
        out, entry = attention(x, at, cache, 0, shared, lambda x: x, None)
        return cache.write([entry], at), out

    cache, found = KeyValueCache.empty(*sizes, config.dtype), []
    for t in range(x.shape[1]):
        here = jax.tree.map(lambda a, t=t: a[:, t : t + 1], (x, at))
        cache, out = step(cache, *here)
        found.append(out)
    ours = jnp.concatenate(found, axis=1)
    yield "out.hidden_states_cached", ours, case["out.hidden_states_cached"]


def deberta_layer(case: Case, projections: Projections, names: dict[str, str]):
    """Yields the context of our layer; `names` as in `deberta.encoding`."""
    encoding, params = deberta.encoding(case, names)
    shared = {"embeddings": params.pop("embeddings")}
    heads, head_dim = projections["query"][0].shape[1:]
    # The source stops in front of its output projection.
    projections = {**projections, "output": identity(heads, head_dim)}
    if any(name.endswith("bias") for name in params):
        encoding = dataclasses.replace(encoding, bias=True)
        for name in [name for name in ("key", "query") if name in params]:
            # Version 1 has no bias of keys.
            params.setdefault(f"{name}_bias", jnp.zeros((heads, head_dim)))
    attention = layer(encoding, projections, params, bidirectional=True)
    at = deberta.places(case)
    real = (np.asarray(at.segment) != 0)[:, :, None]
    ours = run(attention, case["in.hidden_states"], at, shared)
    yield deberta.compare(case, "out.context", ours, real)


@covers("deberta", arrays=("w.query_proj.weight", "in.mask"), config=("share_att_key",))
def deberta_v2_layer(case: Case):
    heads = case.config["num_heads"]
    projections = {
        name: deberta.projection(case, f"{name}_proj", heads)
        for name in ("query", "key", "value")
    }
    names = {"key": "key_proj", "query": "query_proj"}
    if not case.config["share_att_key"]:
        names = {ours: f"pos_{name}" for ours, name in names.items()}
    yield from deberta_layer(case, projections, names)


@covers(
    "deberta",
    arrays=("w.in_proj.weight", "w.q_bias", "w.v_bias", "in.mask"),
    when=lambda case: not case.config.get("talking_head"),
)
def deberta_v1_layer(case: Case):
    heads, fused = case.config["num_heads"], case["w.in_proj.weight"].T
    # Each head's columns are its queries, keys and values; keys have no bias.
    parts = fused.reshape(fused.shape[0], heads, 3, -1)
    bias = {"query": "w.q_bias", "key": None, "value": "w.v_bias"}
    projections = {
        name: (parts[:, :, i], None if b is None else case[b].reshape(heads, -1))
        for i, (name, b) in enumerate(bias.items())
    }
    names = {"key": "pos_proj", "query": "pos_q_proj"}
    yield from deberta_layer(case, projections, names)


@covers(arrays=("w.pos_bias_u", "w.linear_pos.weight", "in.hidden_states"))
def conformer_layer(case: Case):
    heads, x = case.config["num_heads"], case["in.hidden_states"]
    names = {"query": "q", "key": "k", "value": "v"}
    projections = {
        ours: deberta.projection(case, f"linear_{name}", heads)
        for ours, name in names.items()
    }
    projections["output"] = output(case, "linear_out", heads)
    order = np.r_[0 : x.shape[2] : 2, 1 : x.shape[2] : 2]  # as in `conformer`
    own = {
        "content_bias": case["w.pos_bias_u"],
        "position_bias": case["w.pos_bias_v"],
        "projection": split_kernel(case["w.linear_pos.weight"], heads)[order],
    }
    xl = TransformerXLRelative(untie=True)
    attention = layer(xl, projections, own, bidirectional=True)
    ours = run(attention, x, where.contiguous(*x.shape[:2]), {})
    yield "out.hidden_states", ours, case["out.hidden_states"]

"""Transformer-XL written plainly in JAX: every score and bias is an array of pairs.

What a careful user would write from the paper (Dai et al. 2019, section 3.3, appendix
B) without a library: one `jax.jit` a step, dense softmax, the relative shift by a pad
and a reshape.
"""

import functools

import jax
import jax.numpy as jnp
import optax

from experiments.benchmarks.peers import Peer
from experiments.benchmarks.peers.naive_attention import attention
from experiments.benchmarks.workloads import ADAM, LEARNING_RATE, Workload

__all__ = ["attention", "training"]


def training(variant: str, workload: dict) -> Peer:
    """Returns updates of the model; `variant` is not used."""
    sizes = Workload(**workload)
    params = init(jax.random.key(0), sizes)
    optimizer = optax.adam(LEARNING_RATE, **ADAM)
    memory = jnp.zeros((sizes.layers, sizes.batch, sizes.memory, sizes.width))
    state = params, optimizer.init(params), memory
    rows = jnp.asarray(sizes.bytes(4))

    @functools.partial(jax.jit, donate_argnums=0)
    def update(state, row):
        params, moments, memory = state

        def loss(params):
            logits, after = forward(params, row[:, :-1], memory, sizes)
            losses = optax.softmax_cross_entropy_with_integer_labels(logits, row[:, 1:])
            return losses.mean(), after

        (value, memory), gradient = jax.value_and_grad(loss, has_aux=True)(params)
        changes, moments = optimizer.update(gradient, moments)
        return (optax.apply_updates(params, changes), moments, memory), value

    step = 0

    def run(count):
        nonlocal state, step
        for _ in range(count):
            state, value = update(state, rows[step % len(rows)])
            step += 1
        jax.block_until_ready((state, value))

    return Peer(run, sum(leaf.size for leaf in jax.tree.leaves(params)))


def init(key: jax.Array, sizes: Workload) -> dict:
    """Returns the parameters."""
    keys = iter(jax.random.split(key, 8 * sizes.layers + 1))
    width, inner, heads = sizes.width, sizes.feedforward, sizes.heads

    def matrix(*shape):
        return 0.02 * jax.random.normal(next(keys), shape)

    def norm():
        return {"scale": jnp.ones(width), "bias": jnp.zeros(width)}

    head_dim = width // heads
    layers = [
        {
            "qkv": matrix(3, width, heads, head_dim),
            "out": matrix(heads, head_dim, width),
            "positions": matrix(width, heads, head_dim),
            "norm": norm(),
            "inner": matrix(width, inner),
            "inner_bias": jnp.zeros(inner),
            "outer": matrix(inner, width),
            "outer_bias": jnp.zeros(width),
            "ff_norm": norm(),
        }
        for _ in range(sizes.layers)
    ]
    return {
        "embedding": matrix(sizes.vocabulary, width),
        "u": jnp.zeros((heads, head_dim)),
        "v": jnp.zeros((heads, head_dim)),
        "layers": layers,
        "norm": norm(),
    }


def forward(params, tokens, memory, sizes: Workload):
    """Returns logits `[b t v]` and the memory after these tokens."""
    x = params["embedding"][tokens] * sizes.width**0.5
    length, slots = tokens.shape[1], memory.shape[2]
    waves = sinusoid(jnp.arange(slots + length - 1, -1, -1), sizes.width)
    visible = jnp.tril(jnp.ones((length, slots + length), bool), slots)
    entries = []
    for layer, old in zip(params["layers"], memory, strict=True):
        entries.append(jnp.concatenate([old, x], axis=1)[:, length:])
        seen = normalise(layer["norm"], jnp.concatenate([old, x], axis=1))
        q = jnp.einsum("btw,whd->bthd", seen[:, slots:], layer["qkv"][0])
        k = jnp.einsum("btw,whd->bthd", seen, layer["qkv"][1])
        v = jnp.einsum("btw,whd->bthd", seen, layer["qkv"][2])
        r = jnp.einsum("nw,whd->nhd", waves, layer["positions"])
        out = transformer_xl(q, k, v, r, params["u"], params["v"], visible)
        x = x + jnp.einsum("bthd,hdw->btw", out, layer["out"])
        inner = normalise(layer["ff_norm"], x) @ layer["inner"]
        inner = jax.nn.relu(inner + layer["inner_bias"][None, None])
        x = x + inner @ layer["outer"] + layer["outer_bias"][None, None]
    x = normalise(params["norm"], x)
    logits = jnp.einsum("btw,vw->btv", x, params["embedding"])
    return logits, jax.lax.stop_gradient(jnp.stack(entries))


def transformer_xl(q, k, v, r, content_bias, position_bias, visible):
    """Returns attention `[b t h d]`; `r` are keys of distances, the largest first."""
    content = jnp.einsum("bqhd,bkhd->bhqk", q + content_bias[None, None], k)
    relative = jnp.einsum("bqhd,nhd->bhqn", q + position_bias[None, None], r)
    batch, heads, queries, keys = relative.shape
    relative = jnp.pad(relative, ((0, 0), (0, 0), (0, 0), (1, 0)))
    relative = relative.reshape(batch, heads, keys + 1, queries)[:, :, 1:]
    relative = relative.reshape(batch, heads, queries, keys)
    logits = (content + relative) * q.shape[-1] ** -0.5
    return attend(logits, v, visible)


def attend(logits, v, visible):
    """Returns the softmax of visible logits times the values, `[b t h d]`."""
    weights = jax.nn.softmax(jnp.where(visible[None, None], logits, -1e30), axis=-1)
    return jnp.einsum("bhqk,bkhd->bqhd", weights, v)


def sinusoid(position, width: int):
    """Returns sines, then cosines, `[n w]`."""
    rate = 10000.0 ** (-jnp.arange(0, width, 2) / width)
    angle = position[:, None] * rate[None]
    return jnp.concatenate([jnp.sin(angle), jnp.cos(angle)], axis=-1)


def normalise(norm, x):
    """Layer norm."""
    mean = jnp.mean(x, axis=-1, keepdims=True)
    variance = jnp.mean((x - mean) ** 2, axis=-1, keepdims=True)
    x = (x - mean) * jax.lax.rsqrt(variance + 1e-5)
    return x * norm["scale"][None, None] + norm["bias"][None, None]

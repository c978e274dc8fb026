"""Decoding written plainly in JAX: a key/value cache of fixed size, one token a step.

Keys are kept turned (RoPE) or as they are; a step computes scores with every slot and
masks those that are still empty. All tokens of a call run inside one compiled scan.
"""

import math

import jax
import jax.numpy as jnp

from experiments.benchmarks.peers import naive
from experiments.benchmarks.workloads import Workload

ENCODINGS = ("none", "rope", "alibi", "t5", "transformer_xl")


def decode(encoding: str, sizes: Workload, slots: int, count: int):
    """Returns parameters, an empty state, and the compiled call that adds tokens.

    The call maps `(params, cache, token, position)` to the same but the parameters,
    `count` tokens later; `cache` is `[2, l, slots, h, d]`.
    """
    head_dim = sizes.width // sizes.heads
    params = naive.init(jax.random.key(0), sizes)
    params["table"] = 0.02 * jax.random.normal(jax.random.key(1), (32, sizes.heads))
    waves = naive.sinusoid(jnp.arange(slots), sizes.width)
    rate = 10000.0 ** (-jnp.arange(head_dim // 2) / (head_dim // 2))
    slopes = 2.0 ** (-8 * jnp.arange(1, sizes.heads + 1) / sizes.heads)

    def turn(x, position):
        angle = position * rate[None]
        one, two = jnp.split(x, 2, axis=-1)
        cos, sin = jnp.cos(angle), jnp.sin(angle)
        return jnp.concatenate([one * cos - two * sin, two * cos + one * sin], axis=-1)

    def scores(layer, params, q, keys, far):
        scale = 1.0 if encoding == "t5" else head_dim**-0.5
        if encoding == "transformer_xl":
            r = jnp.einsum("nw,whd->nhd", waves, layer["positions"])
            relative = jnp.einsum("hd,nhd->hn", q + params["v"], r)
            q = q + params["u"]
        found = jnp.einsum("hd,nhd->hn", q, keys) * scale
        if encoding == "transformer_xl":
            found = found + jnp.take(relative, far, axis=1, mode="clip") * scale
        if encoding == "alibi":
            found = found - slopes[:, None] * far[None]
        if encoding == "t5":
            large = jnp.log(jnp.maximum(far, 1) / 16) / math.log(8) * 16
            large = jnp.minimum(16 + large.astype(int), 31)
            found = found + params["table"][jnp.where(far < 16, far, large)].T
        return jnp.where(far[None] >= 0, found, -1e30)

    def step(params, cache, token, position):
        x = params["embedding"][token] * sizes.width**0.5
        far = position - jnp.arange(slots)
        for i, layer in enumerate(params["layers"]):
            seen = naive.normalise(layer["norm"], x[None, None])[0, 0]
            q, k, v = jnp.einsum("w,nwhd->nhd", seen, layer["qkv"])
            if encoding == "rope":
                q, k = turn(q, position), turn(k, position)
            new = jnp.stack([k, v])[:, None, None]
            cache = jax.lax.dynamic_update_slice(cache, new, (0, i, position, 0, 0))
            weights = jax.nn.softmax(scores(layer, params, q, cache[0, i], far))
            out = jnp.einsum("hn,nhd->hd", weights, cache[1, i])
            x = x + jnp.einsum("hd,hdw->w", out, layer["out"])
            inner = naive.normalise(layer["ff_norm"], x[None, None])[0, 0]
            inner = jax.nn.relu(inner @ layer["inner"] + layer["inner_bias"])
            x = x + inner @ layer["outer"] + layer["outer_bias"]
        x = naive.normalise(params["norm"], x[None, None])[0, 0]
        return cache, jnp.argmax(params["embedding"] @ x), position + 1

    def call(params, cache, token, position):
        def body(state, _):
            return step(params, *state), None

        state, _ = jax.lax.scan(body, (cache, token, position), None, length=count)
        return state

    cache = jnp.zeros((2, sizes.layers, slots, sizes.heads, head_dim))
    return params, cache, jax.jit(call, donate_argnums=1)

"""The forget gate of Lin et al. 2025 (section 3): decay that the content sets."""

import dataclasses
from typing import ClassVar

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Num

from relpos_jax.positional.protocol import Block, Dims, Params, PositionEncoding
from relpos_jax.relative import Layout
from relpos_jax.where import Where


def log_gates(
    x: Float[Array, "b t w"], weight: Float[Array, "w h"], bias: Float[Array, " h"]
) -> Float[Array, "b t h"]:
    """Returns `log f_t = log sigmoid(w . x_t + b)` of every head, float32."""
    product = jnp.einsum(
        "btw,wh->bth", x.astype(jnp.float32), weight.astype(jnp.float32)
    )
    return jax.nn.log_sigmoid(product + bias.astype(jnp.float32)[None, None, :])


def _two_sum(a, b):
    """Returns the rounded sum of two floats and what the rounding left out (Knuth)."""
    total = a + b
    part = total - a
    return total, (a - (total - part)) + (b - part)


def _scan(values, starts, plus):
    """Accumulates pytrees `values` along time; starts again where `starts` is true."""

    def combine(old, new):
        (_, old_values), (fresh, new_values) = old, new
        summed = plus(old_values, new_values)
        kept = jax.tree.map(lambda x, y: jnp.where(fresh, x, y), new_values, summed)
        return old[0] | fresh, kept

    return jax.lax.associative_scan(combine, (starts[:, :, None], values), axis=1)[1]


@jax.custom_jvp
def prefix_sums(
    x: Float[Array, "b t h"], starts: Bool[Array, "b t"]
) -> Float[Array, "b t h two"]:
    """Returns sums of `x` from the last start to each place, as two floats.

    The second float holds what the first one's rounding left out. A single float32 is
    off by up to 5e-4 where a sum reaches 10,000 (16k gates of one half), and so is the
    difference of two; differences of pairs, `(a0 - b0) + (a1 - b1)`, keep a relative
    error of about 1e-7 however far along the document they are taken.
    """

    def plus(a, b):
        high, lost = _two_sum(a[0], b[0])
        return high, a[1] + b[1] + lost

    return jnp.stack(_scan((x, jnp.zeros_like(x)), starts, plus), axis=-1)


@prefix_sums.defjvp
def _prefix_sums_jvp(primals, tangents):
    # The lost parts have no derivative of their own.
    x, starts = primals
    change = _scan(tangents[0], starts, jnp.add)
    return prefix_sums(x, starts), jnp.stack([change, jnp.zeros_like(change)], axis=-1)


def accumulate(
    log_gate: Float[Array, "b k h"], q_at: Where, k_at: Where, layout: Layout | None
) -> tuple[Float[Array, "b q h two"], Float[Array, "b k h two"]]:
    """Returns `F = sum of log f` up to each query and up to each key, in its document.

    Sums run in the order of positions, through every key that the call has; empty slots
    add nothing. Where the layout is known that is the order of the columns; otherwise
    keys and queries are sorted together, a query behind the key of its own position.
    """
    log_gate = jnp.where((k_at.segment != 0)[:, :, None], log_gate, 0.0)

    def sums(log_gate, segment):
        # Empty slots, whose segment is 0, don't end the document around them.
        document = jax.lax.cummax(segment, axis=1)
        before = jnp.pad(document[:, :-1], ((0, 0), (1, 0)), constant_values=-1)
        return prefix_sums(log_gate, document != before)

    queries, keys = q_at.position.shape[1], k_at.position.shape[1]
    if layout is not None:
        of_keys = sums(log_gate, k_at.segment)
        return of_keys[:, layout.offset : layout.offset + queries], of_keys

    def both(of_keys: Num[Array, "b k"], of_queries: Num[Array, "b q"]):
        return jnp.concatenate([of_keys, of_queries], axis=1)

    segment = both(k_at.segment, q_at.segment)
    position = both(k_at.position, q_at.position)
    query = both(jnp.zeros_like(k_at.segment), jnp.ones_like(q_at.segment))
    order = jnp.lexsort((query, position, segment), axis=1)
    wide = jnp.pad(log_gate, ((0, 0), (0, queries), (0, 0)))

    def take(x, index):
        return jax.vmap(lambda x, index: x[index])(x, index)

    found = sums(take(wide, order), take(segment, order))
    found = take(found, jnp.argsort(order, axis=1))
    return found[:, keys:], found[:, :keys]


def decay(
    of_queries: Float[Array, "b h q two"], of_keys: Float[Array, "b h k two"]
) -> Float[Array, "b h q k"]:
    """Returns `D_ij = F_i - F_j = log f_(j+1) + ... + log f_i`."""

    def apart(part):
        x, y = of_queries[..., part], of_keys[..., part]
        if part == 1:  # what rounding lost has no derivative of its own
            x, y = jax.lax.stop_gradient((x, y))
        return x[:, :, :, None] - y[:, :, None, :]

    return apart(0) + apart(1)


@dataclasses.dataclass(frozen=True)
class Forgetting(PositionEncoding):
    """Adds `log f_(j+1) + ... + log f_i` to the logit of query i and key j.

    `f_t = sigmoid(w_h . x_t + b_h)` is a gate per token and head, from the input of the
    attention layer (behind its norm, where that comes first). With constant gates this
    is ALiBi of slope `-log f`. Neither scaled by 1/sqrt(d) nor by anything else, unless
    `log_scale` says so.

    Not as in the paper: its layer is another one as well (output gate and norm,
    normalised queries and keys, shifted keys); this is its forget gate alone. Initial
    weights have standard deviation 1/sqrt(w), as this code base's other projections.

    The sums go through the keys that a call has: right with memory and caches, since a
    key is only forgotten by tokens that came later, which are still there.

    Raises:
      ValueError: `attend` was given no features.

    Attributes:
      gate_bias: initial `b`. 0 halves a key's weight with each token at
        first; 5 (x-transformers' data-dependent ALiBi) takes 0.7 % of it.
      log_scale: factor of the logarithms (x-transformers' `post_log_scale`).
    """

    gate_bias: float = 0.0
    log_scale: float = 1.0

    causal_only: ClassVar[bool] = True
    ordinal: ClassVar[bool] = True  # of positions only the order matters

    def init(self, key: jax.Array, dims: Dims) -> Params:
        shape = (dims.width, dims.heads)
        return {
            "weight": dims.width**-0.5 * jax.random.normal(key, shape),
            "bias": jnp.full((dims.heads,), self.gate_bias, jnp.float32),
        }

    def features(
        self, params: Params, x: Float[Array, "b t w"]
    ) -> Float[Array, "b t h f"]:
        gates = log_gates(x, params["weight"], params["bias"])
        return self.log_scale * gates[..., None]

    def prepare(
        self,
        params: Params,
        features: Float[Array, "b k h f"] | None,
        q_at: Where,
        k_at: Where,
        layout: Layout | None,
    ):
        if features is None:
            raise ValueError(
                "forgetting needs the keys' gates: pass "
                "attend(features=encoding.features(params, x)), x the layer's input"
            )
        return params, *accumulate(features[..., 0], q_at, k_at, layout)

    def score(self, params: Params, block: Block) -> Float[Array, "b h q k"]:
        bias = decay(block.q_data, block.k_data)
        # Pairs that don't attend may be of different documents: no sum lies between.
        return block.logits + jnp.where(block.visible, bias, 0.0)

    def past_training(self) -> str:
        return "Far keys fade as fast as the tokens in between say."

"""DeBERTa's disentangled attention (He et al. 2021, equations 2-4; He et al. 2023)."""

import dataclasses
import math

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int, Num

from relpos_jax.positional.protocol import (
    Block,
    Dims,
    Params,
    PositionEncoding,
    leading,
)

TERMS = ("c2p", "p2c")


def log_bucket_edges(buckets: int, max_position: int, count: int) -> tuple[int, ...]:
    """Returns the last distance of `count` buckets, the exact ones' end first.

    Element `m` is the floor of `mid ((max_position - 1) / mid)^(m / (mid - 1))` with
    `mid = buckets // 2`, found in integers: a float32 logarithm may fall on either side
    of an edge, above all at `max_position - 1`.

    Raises:
      ValueError: fewer than 4 buckets, or `max_position - 1` inside the exact ones.
    """
    mid = buckets // 2
    if mid < 2 or max_position - 1 <= mid:
        raise ValueError(
            f"need at least 4 buckets and max_position - 1 above half of them, "
            f"got {buckets} buckets and max_position {max_position}"
        )
    root, edges = mid - 1, []
    for m in range(count):
        # The largest n with n^root mid^m <= (max_position - 1)^m mid^root.
        bound = (max_position - 1) ** m * mid**root
        n = int(mid * math.exp(math.log((max_position - 1) / mid) * m / root))
        while n**root * mid**m > bound:
            n -= 1
        while (n + 1) ** root * mid**m <= bound:
            n += 1
        edges.append(n)
    return tuple(edges)


def log_bucket(
    distance: Num[Array, "*n"], *, buckets: int, max_position: int, last: int = 0
) -> Int[Array, "*n"]:
    """Returns signed buckets (DeBERTa v2 and v3): exact near 0, logarithmic beyond.

    `d` itself where `|d| <= mid`, else `sign(d) (mid + ceil(log(|d| / mid) /
    log((max_position - 1) / mid) (mid - 1)))`, with `mid = buckets // 2`. As in the
    released code, `|d| >= max_position` goes on past `buckets - 1`: the attention clips
    afterwards.

    Args:
      distance: query position minus key position.
      buckets: number of rows on each side.
      max_position: distance `max_position - 1` is in bucket `buckets - 1`.
      last: no bucket is farther than this one; 0 for no end.
    """
    mid, far = buckets // 2, jnp.abs(distance.astype(jnp.int32))
    if last:
        count = max(last - mid, 0)
    else:
        spread = math.log((max_position - 1) / mid)
        count = math.floor(math.log(2**31 / mid) / spread * (mid - 1))
    edges = jnp.asarray(log_bucket_edges(buckets, max_position, count), jnp.int32)
    beyond = jnp.searchsorted(edges, far, side="left").astype(jnp.int32)
    bucket = jnp.where(far <= mid, far, mid + beyond)
    return jnp.where(distance < 0, -bucket, bucket)


def relative_row(
    distance: Num[Array, "*n"], *, span: int, buckets: int = 0
) -> Int[Array, "*n"]:
    """Returns `delta` of equation 3, a row in `0 .. 2 s - 1`; `s` is distance 0.

    Args:
      distance: query position minus key position.
      span: `k` of the paper, where distances clip; with buckets, their max_position.
      buckets: log buckets on each side (`s`); 0 for a row a distance (`s = span`).
    """
    if buckets:
        side = buckets
        distance = log_bucket(
            distance, buckets=buckets, max_position=span, last=buckets
        )
    else:
        side = span
    return jnp.clip(distance.astype(jnp.int32) + side, 0, 2 * side - 1)


@dataclasses.dataclass(frozen=True)
class Deberta(PositionEncoding):
    """Content meets position in both directions, with vectors of their own.

    `(q_i . k_j + q_i . K_delta + k_j . Q_delta) / sqrt(d (1 + terms))`, where
    `K = P W_K` and `Q = P W_Q` project a table `P` of relative embeddings that all
    layers share,
    and `delta = relative_row(i - j)`. All terms, the content's too, are divided by the
    number of terms.

    Equation 4 reads `Q` at `delta(j, i)`; the released code, and with it all published
    weights, at `delta(i, j)`. Not here: dropout or a layer norm on `P` (v2), and the
    position-to-position term, which the paper leaves out as well.

    Parameters: `embeddings [2s w]` (shared), `key [w h d]` and `query [w h d]` (a
    layer's own). Biases are added where `key_bias` or `query_bias [h d]` is among them.
    `share_att_key` of the released code is the layer's own query and key projections
    (with their biases) handed over as these parameters.

    Attributes:
      span: distances clip at `-span` and `span - 1`; with buckets, where they end.
      buckets: log buckets on each side (v2, v3); 0 for a row a distance (v1).
      terms: "c2p" (content-to-position), "p2c", or both.
      p2c_index: "code" or "paper", see above.
      bias: the projections have biases (released code: v1's query, v2's both).
    """

    span: int = 128
    buckets: int = 0
    terms: tuple[str, ...] = TERMS
    p2c_index: str = "code"
    bias: bool = False

    def __post_init__(self):
        if not self.terms or sorted({*self.terms}) != sorted(self.terms):
            raise ValueError(f"terms must be one or two of {TERMS}, got {self.terms}")
        for term in self.terms:
            if term not in TERMS:
                raise ValueError(f"unknown term {term!r}; known: {', '.join(TERMS)}")
        if self.p2c_index not in ("code", "paper"):
            raise ValueError(f"p2c_index must be code or paper, got {self.p2c_index!r}")
        if self.span < 1:
            raise ValueError(f"span must be positive, got {self.span}")
        if self.buckets:
            log_bucket_edges(self.buckets, self.span, 1)

    def init(self, key: jax.Array, dims: Dims) -> Params:
        shape, params = (dims.width, dims.heads, dims.head_dim), {}
        for term, part in zip(TERMS, jax.random.split(key), strict=True):
            name = {"c2p": "key", "p2c": "query"}[term]
            if term in self.terms:
                params[name] = dims.width**-0.5 * jax.random.normal(part, shape)
                if self.bias:
                    params[f"{name}_bias"] = jnp.zeros(shape[1:])
        return params

    def init_shared(self, key: jax.Array, dims: Dims) -> Params:
        shape = (2 * (self.buckets or self.span), dims.width)
        return {"embeddings": 0.02 * jax.random.normal(key, shape)}

    def scale(self, head_dim: int) -> float:
        return (head_dim * (1 + len(self.terms))) ** -0.5

    def table(self, params: Params, distance: Num[Array, "*n"]) -> Params:
        rows = {}
        for term, name, flip in (("c2p", "key", False), ("p2c", "query", True)):
            if term not in self.terms:
                continue
            # There are fewer rows than distances: project first, then look up.
            kernel = params[name].astype(jnp.float32)
            table = jnp.einsum("nw,whd->nhd", params["embeddings"], kernel)
            if f"{name}_bias" in params:
                table = table + leading(params[f"{name}_bias"], 3)
            signed = -distance if flip and self.p2c_index == "paper" else distance
            row = relative_row(signed, span=self.span, buckets=self.buckets)
            rows[term] = table[row]
        return rows

    def saturation(self) -> int | None:
        return self.span

    def score(self, params: Params, block: Block) -> Float[Array, "b h q k"]:
        logits = block.logits
        if "c2p" in self.terms:
            table = block.table["c2p"]
            logits = logits + block.scaled(block.rel.query_dot, block.q, table)
        if "p2c" in self.terms:
            table = block.table["p2c"]
            logits = logits + block.scaled(block.rel.key_dot, block.k, table)
        return logits

    def past_training(self) -> str:
        end = self.span - 1 if self.buckets else self.span
        return f"Distances from {end} on share the last row: alike, not undefined."

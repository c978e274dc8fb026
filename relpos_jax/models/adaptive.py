"""Adaptive embedding and adaptive softmax, as pure functions of their parameters.

Frequent ids form the shortlist, the others clusters. The softmax's head gives every id
of the shortlist and every cluster a probability, and a cluster's tail shares the
cluster's among its ids (Grave et al. 2017, section 3). Rarer clusters may have narrower
embeddings, each with a projection from or to the model's width, and both uses may share
tables and projections (Baevski & Auli 2019, section 3; Dai et al. 2019, section 4).

The parameters are two dicts. `embedding` has `table` (`{"0": [n e], ...}`, one a
cluster, or a single one where all have one width) and, where there are projections,
`projection` (`{"0": [w e], ...}`). `softmax` has `cluster` `[c e]` and what is not the
embedding's: `bias`, `cluster_bias`, `table` where untied, `projection` of the clusters
whose projection is untied. What is tied is stored once.
"""

import dataclasses
from typing import Any, Literal, NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from relpos_jax.axes import whole_rows
from relpos_jax.positional.protocol import leading

Tree = dict[str, Any]


@dataclasses.dataclass(frozen=True)
class AdaptiveConfig:
    """How ids are clustered, and what the clusters share.

    Attributes:
      cutoffs: ids at which a cluster begins, ascending, excluding 0 and the vocabulary;
        () is a plain softmax.
      div_val: cluster i has embeddings of width `embed_dim // div_val**i`. With 1 all
        ids are in one table.
      embed_dim: width of the first cluster's embeddings; None for the model's. There
        are projections where it is not the model's or `div_val` is above 1.
      tie_projections: for each cluster, the first among them, whether the softmax uses
        the embedding's projection; () for all tied. Without projections it says
        nothing. (Tables are tied by `ModelConfig.tie_embeddings`.)
      head_order: which column of the head belongs to which cluster. "hugging_face": in
        the clusters' order. "official": reversed, as in Dai et al.'s PyTorch code.

    Raises:
      ValueError: cutoffs that are unsorted, repeated or below 1; a `div_val` or
        `embed_dim` below 1; a wrong number of flags; an unknown order.
    """

    cutoffs: tuple[int, ...] = ()
    div_val: int = 1
    embed_dim: int | None = None
    tie_projections: tuple[bool, ...] = ()
    head_order: Literal["official", "hugging_face"] = "official"

    def __post_init__(self):
        if list(self.cutoffs) != sorted(set(self.cutoffs)):
            raise ValueError(
                f"adaptive.cutoffs must ascend without repetition, got {self.cutoffs}"
            )
        if self.cutoffs and self.cutoffs[0] < 1:
            raise ValueError(
                f"adaptive.cutoffs must be at least 1, got {self.cutoffs}: the "
                "shortlist before the first cutoff needs an id"
            )
        if self.div_val < 1:
            raise ValueError(f"adaptive.div_val must be positive, got {self.div_val}")
        if self.embed_dim is not None and self.embed_dim < 1:
            raise ValueError(
                f"adaptive.embed_dim must be positive or None, got {self.embed_dim}"
            )
        count = len(self.tie_projections)
        if count not in (0, len(self.cutoffs) + 1):
            raise ValueError(
                f"adaptive.tie_projections has {count} flags for "
                f"{len(self.cutoffs) + 1} clusters: give one each, the shortlist's "
                "first, or () for all tied"
            )
        if self.head_order not in ("official", "hugging_face"):
            raise ValueError(
                "adaptive.head_order must be 'official' or 'hugging_face', got "
                f"{self.head_order!r}"
            )

    def check(self, vocabulary: int, width: int) -> None:
        """Raises ValueError if these clusters do not fit a model of these sizes."""
        if self.cutoffs and self.cutoffs[-1] >= vocabulary:
            raise ValueError(
                f"adaptive.cutoffs must be below the vocabulary of {vocabulary}, got "
                f"{self.cutoffs}: leave the vocabulary itself out"
            )
        if self.widths(width)[-1] < 1:
            raise ValueError(
                f"adaptive.div_val {self.div_val} leaves the last of "
                f"{len(self.cutoffs) + 1} clusters no width: {self.widths(width)}; "
                "take a smaller div_val, fewer cutoffs or a larger embed_dim"
            )

    def ranges(self, vocabulary: int) -> tuple[tuple[int, int], ...]:
        """Returns each cluster's first id and the id past its last."""
        ends = (*self.cutoffs, vocabulary)
        return tuple(zip((0, *self.cutoffs), ends, strict=True))

    def widths(self, width: int) -> tuple[int, ...]:
        """Returns the width of each cluster's embeddings, for a model's `width`."""
        first = width if self.embed_dim is None else self.embed_dim
        return tuple(first // self.div_val**i for i in range(len(self.cutoffs) + 1))

    def tables(self, vocabulary: int, width: int) -> tuple[tuple[int, int], ...]:
        """Returns the shapes of the embedding's tables."""
        widths = self.widths(width)
        if self.div_val == 1:
            return ((vocabulary, widths[0]),)
        ranges = self.ranges(vocabulary)
        return tuple((b - a, e) for (a, b), e in zip(ranges, widths, strict=True))

    def projected(self, width: int) -> bool:
        """Returns whether embeddings are projected to the model's width."""
        return self.div_val > 1 or self.embed_dim not in (None, width)

    def own_projections(self, width: int) -> tuple[int, ...]:
        """Returns the clusters whose softmax has a projection of its own."""
        if not self.projected(width):
            return ()
        return tuple(i for i, tied in enumerate(self.tie_projections) if not tied)

    def column(self, cluster: int) -> int:
        """Returns the head's column, behind the shortlist, of tail 1, 2, ..."""
        if self.head_order == "official":
            return len(self.cutoffs) - cluster
        return cluster - 1


def init(
    config: AdaptiveConfig,
    key: jax.Array,
    vocabulary: int,
    width: int,
    *,
    tie_tables: bool = True,
    bias: bool = True,
    std: float | None = None,
) -> tuple[Tree, Tree]:
    """Returns first parameters of the embedding and of the softmax.

    Args:
      config: the clusters.
      key: for the matrices; biases are 0.
      vocabulary: number of ids.
      width: the model's.
      tie_tables: the softmax uses the embedding's tables.
      bias: whether the softmax has biases.
      std: of all matrices; None for 1/sqrt(width) of the tables' and the projections'
        output, with which embeddings and logits vary as those of a plain model.
    """
    shapes, widths = config.tables(vocabulary, width), config.widths(width)

    def matrix(number, shape, fan):
        own = jax.random.fold_in(key, number)
        return (fan**-0.5 if std is None else std) * jax.random.normal(own, shape)

    def tables(use):
        return {str(i): matrix(use + i, s, s[1]) for i, s in enumerate(shapes)}

    def projections(use, clusters):
        shape = ((width, widths[i]) for i in clusters)
        return {
            str(i): matrix(use + i, s, width)
            for i, s in zip(clusters, shape, strict=True)
        }

    tails = len(config.cutoffs)
    embedding, softmax = {"table": tables(0)}, {}
    if config.projected(width):
        embedding["projection"] = projections(1000, range(len(shapes)))
    if not tie_tables:
        softmax["table"] = tables(2000)
    if config.own_projections(width):
        softmax["projection"] = projections(3000, config.own_projections(width))
    if tails:
        softmax["cluster"] = matrix(4000, (tails, widths[0]), widths[0])
    if bias:
        softmax["bias"] = {str(i): jnp.zeros(s[0]) for i, s in enumerate(shapes)}
        if tails:
            softmax["cluster_bias"] = jnp.zeros(tails)
    return embedding, softmax


def embed(
    config: AdaptiveConfig, embedding: Tree, tokens: Int[Array, "*b"], dtype: Any
) -> Float[Array, "*b w"]:
    """Returns the tokens' embeddings in the model's width, float32, not yet scaled.

    Computes every cluster's projection for every token and keeps the right one: the
    widths fall with `div_val`, so that is at most twice the work of the shortlist's.
    An id outside the vocabulary gives NaN.

    Args:
      config: the clusters.
      embedding: parameters, see `init`.
      tokens: ids.
      dtype: of the factors of the products.
    """
    tables = embedding["table"]
    start, x = 0, jnp.nan
    for name in sorted(tables, key=int):
        table = whole_rows(tables[name])
        inside = (tokens >= start) & (tokens < start + len(table))
        rows = table.at[jnp.where(inside, tokens - start, 0)].get(mode="clip")
        if "projection" in embedding:
            projection = embedding["projection"][name]
            rows = jnp.einsum(
                "...e,we->...w",
                rows.astype(dtype),
                projection.astype(dtype),
                preferred_element_type=jnp.float32,
            )
        x = jnp.where(inside[..., None], rows, x)
        start += len(table)
    return x


def log_probabilities(
    config: AdaptiveConfig,
    embedding: Tree,
    softmax: Tree,
    hidden: Float[Array, "*b w"],
) -> Float[Array, "*b v"]:
    """Returns every id's log-probability, float32; they sum to one (exponentiated).

    They are their own logits: sample from them as from a plain model's.
    """
    clusters = _clusters(config, embedding, softmax)
    head = jax.nn.log_softmax(_head_logits(clusters, softmax, hidden))
    shortlist = clusters[0].stop
    parts = [head[..., :shortlist]]
    for i, cluster in enumerate(clusters[1:], start=1):
        column = shortlist + config.column(i)
        tail = jax.nn.log_softmax(_logits(cluster, hidden))
        parts.append(head[..., column : column + 1] + tail)
    return jnp.concatenate(parts, axis=-1)


def losses(
    config: AdaptiveConfig,
    embedding: Tree,
    softmax: Tree,
    hidden: Float[Array, "*b w"],
    targets: Int[Array, "*b"],
    *,
    chunk: int = 1024,
) -> Float[Array, "*b"]:
    """Returns -log p(target) of each token, nats, float32, in the tokens' order.

    More tokens than `chunk` are sorted by their target's cluster and go through the
    softmax a chunk at a time, again in the backward pass: the largest array is one
    chunk by one cluster, and a cluster's tail is computed for those chunks alone that
    have a target in it. So n tokens cost n heads and about n tails between them all,
    and memory grows with n by the hidden states only. A cluster without a target costs
    nothing and gives no NaN. (Where the batch is sharded, sorting moves tokens between
    devices.)

    Args:
      config: the clusters.
      embedding, softmax: parameters, see `init`.
      hidden: the model's last states.
      targets: ids; one outside the vocabulary gives NaN.
      chunk: tokens computed at once.
    """
    shape = targets.shape
    hidden, targets = hidden.reshape(-1, hidden.shape[-1]), targets.reshape(-1)
    clusters = _clusters(config, embedding, softmax)

    def of(hidden, targets):
        return _chunk_losses(config, clusters, softmax, hidden, targets)

    count = len(targets)
    if count <= chunk:
        return of(hidden, targets).reshape(shape)
    order = jnp.argsort(_number(config, targets))
    rest = -count % chunk
    hidden = jnp.pad(hidden[order], ((0, rest), (0, 0)))
    targets = jnp.pad(targets[order], (0, rest))
    chunks = hidden.reshape(-1, chunk, hidden.shape[1]), targets.reshape(-1, chunk)
    found = jax.lax.map(lambda pair: jax.checkpoint(of)(*pair), chunks)
    found = found.reshape(-1)[:count]
    return jnp.zeros_like(found).at[order].set(found).reshape(shape)


def token_losses(
    logits: Float[Array, "*b v"], targets: Int[Array, "*b"]
) -> Float[Array, "*b"]:
    """Returns -log softmax(logits)[target] of each token, in nats, float32.

    A target outside `0 .. v - 1` gives NaN rather than a plausible number: compiled
    code can't raise, and the training loop stops at a loss that isn't finite.

    Args:
      logits: of any float type; the softmax is taken in float32.
      targets: ids already shifted, i.e. the token that follows each input.
    """
    logits = logits.astype(jnp.float32)
    # Negative ids would count from the end; past the end they are filled with NaN.
    index = jnp.where(targets < 0, logits.shape[-1], targets)[..., None]
    picked = jnp.take_along_axis(
        logits, index, axis=-1, mode="fill", fill_value=jnp.nan
    )
    return jax.nn.logsumexp(logits, axis=-1) - picked[..., 0]


class _Cluster(NamedTuple):
    """A cluster's ids `start .. stop - 1` and weights of the softmax."""

    start: int
    stop: int
    table: Array
    projection: Array | None
    bias: Array | None


def _clusters(config, embedding: Tree, softmax: Tree) -> list[_Cluster]:
    tables, bias = softmax.get("table", embedding["table"]), softmax.get("bias")
    vocabulary = sum(len(table) for table in tables.values())
    own, shared = softmax.get("projection", {}), embedding.get("projection", {})
    found = []
    for i, (start, stop) in enumerate(config.ranges(vocabulary)):
        name = "0" if config.div_val == 1 else str(i)
        part = slice(start, stop) if config.div_val == 1 else slice(None)
        projection = own.get(str(i), shared.get(name))
        offset = None if bias is None else bias[name][part]
        found.append(_Cluster(start, stop, tables[name][part], projection, offset))
    return found


def _logits(cluster: _Cluster, hidden) -> Array:
    if cluster.projection is not None:
        hidden = hidden @ cluster.projection.astype(hidden.dtype)
    logits = jnp.einsum(
        "...e,ne->...n",
        hidden,
        cluster.table.astype(hidden.dtype),
        preferred_element_type=jnp.float32,
    )
    if cluster.bias is None:
        return logits
    return logits + leading(cluster.bias, logits.ndim)


def _head_logits(clusters, softmax: Tree, hidden) -> Array:
    head = clusters[0]
    if len(clusters) == 1:
        return _logits(head, hidden)
    table = jnp.concatenate([head.table, softmax["cluster"]])
    bias = head.bias
    if bias is not None:
        bias = jnp.concatenate([bias, softmax["cluster_bias"]])
    return _logits(head._replace(table=table, bias=bias), hidden)


def _number(config, targets) -> Array:
    """Returns the cluster of each target."""
    if not config.cutoffs:
        return jnp.zeros_like(targets)
    reached = targets[..., None] >= leading(jnp.asarray(config.cutoffs), 2)
    return reached.sum(axis=-1, dtype=jnp.int32)


def _chunk_losses(config, clusters, softmax, hidden, targets) -> Array:
    number, shortlist = _number(config, targets), clusters[0].stop
    column = targets
    for i in range(1, len(clusters)):
        column = jnp.where(number == i, shortlist + config.column(i), column)
    loss = token_losses(_head_logits(clusters, softmax, hidden), column)
    for i, cluster in enumerate(clusters[1:], start=1):
        inside = number == i

        def tail(hidden, local, cluster=cluster):
            return token_losses(_logits(cluster, hidden), local)

        def none(hidden, local):
            return jnp.zeros(local.shape, jnp.float32)

        local = jnp.where(inside, targets - cluster.start, 0)
        more = jax.lax.cond(inside.any(), tail, none, hidden, local)
        loss = loss + jnp.where(inside, more, 0)
    return loss

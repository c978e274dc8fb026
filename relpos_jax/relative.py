"""Relative positions: what depends on the distance alone, and how it meets the scores.

An encoding evaluates a *table* of rows, one a distance: scalars per head (a bias) or
vectors per head. Four products of such a table with queries, keys and weights make up
all of relative attention, and four classes offer them with equal results:

* `Pairs` holds a row for every (query, key) pair. Slow, obviously right, any positions:
  the oracle of every other path.
* `Diagonals` holds a row for each of the `q + k - 1` distances of a block of contiguous
  positions, multiplies once a distance, and skews (the relative shift of Dai et al.
  2019, appendix B).
* `Uniform` holds one row, where all distances of a block share it (a clip, a last
  bucket).
* `Joined` holds a row for every pair with the first keys, and diagonals for the rest:
  compressed memory, with segment memory and tokens behind it.

Heads come first in this file: queries `[b h q d]`, keys `[b h k d]`, scores
`[b h q k]`.
"""

import dataclasses
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Int

from relpos_jax import pairwise
from relpos_jax.skew import shift, spread, unshift
from relpos_jax.where import Where

GROUP = 256  # queries that share a window of a table, see `_group`


@dataclasses.dataclass(frozen=True)
class Layout:
    """What is known about positions when a program is compiled.

    It claims that query row `i` is the token of key column `i + offset`, and that
    within each document positions rise along the row; if `unit`, by one a column. Then
    the distance of any pair that may attend is `i + offset - j`, which is what lets
    blockwise attention skip blocks and evaluate tables once a distance. Documents must
    carry non-decreasing ids along a row; empty slots may stand anywhere that does not
    separate two tokens of one document by more than their distance.

    The first `free` columns are left out of what `unit` says: positions rise along
    them, by any steps (the slots of a compressed memory).

    The claim is checked: see `holds`.
    """

    offset: int = 0
    unit: bool = True
    free: int = 0


def holds(layout: Layout, q_at: Where, k_at: Where) -> Bool[Array, " b"]:
    """Returns, for each row of the batch, whether the layout's claim is true.

    O(q + k) work, so that a false claim can be turned into NaN instead of into a
    plausible wrong number.
    """
    queries, keys = q_at.position.shape[1], k_at.position.shape[1]
    if layout.offset < 0 or layout.offset + queries > keys:
        raise ValueError(
            f"layout offset {layout.offset} puts {queries} queries past {keys} keys"
        )
    own = slice(layout.offset, layout.offset + queries)
    same = jnp.all(k_at.segment[:, own] == q_at.segment, axis=1) & jnp.all(
        (k_at.position[:, own] == q_at.position) | (q_at.segment == 0), axis=1
    )
    column = jnp.arange(keys)[None, :]
    real = k_at.segment != 0
    # The last real token before each column: its document and how far along it is.
    before = jax.lax.cummax(jnp.where(real, column, -1), axis=1)
    before = jnp.concatenate([jnp.full_like(before[:, :1], -1), before[:, :-1]], axis=1)
    at_before = jnp.maximum(before, 0)
    segment = jnp.take_along_axis(k_at.segment, at_before, axis=1)
    position = jnp.take_along_axis(k_at.position, at_before, axis=1)
    step = k_at.position - position
    expected = step > 0
    if layout.unit:
        unit = step == column - at_before
        expected = jnp.where(at_before < layout.free, expected, unit)
    continues = segment == k_at.segment
    good = jnp.where(continues, expected, segment < k_at.segment)
    return same & jnp.all(good | ~real | (before < 0), axis=1)


def descending(high: int, count: int) -> Int[Array, " n"]:
    """Returns the `count` distances `high, high - 1, ...`: the row order of tables."""
    return high - jnp.arange(count, dtype=jnp.int32)


def _einsum(spec, x, y):
    # Products on rows of a table take the other operand's type and add up in float32.
    y = y.astype(x.dtype)
    return jnp.einsum(spec, x, y, preferred_element_type=jnp.float32)


class Pairs(NamedTuple):
    """Products with tables of a row for every pair: `[b h q k]`, `[b h q k d]`."""

    def bias(self, table):
        """Returns `t[i - j]` as `[b h q k]`."""
        return table

    def query_dot(self, q, table):
        """Returns `q_i . t[i - j]` as `[b h q k]`."""
        return self._dot("bhqd,bhqkd->bhqk", q, table)

    def key_dot(self, k, table):
        """Returns `k_j . t[i - j]` as `[b h q k]`."""
        return self._dot("bhkd,bhqkd->bhqk", k, table)

    def weighted(self, weights, table):
        """Returns `sum_j w_ij t[i - j]` as `[b h q d]`."""
        return self._dot("bhqk,bhqkd->bhqd", weights, table)

    def _dot(self, spec, x, table):
        shape = (x.shape[0], x.shape[1], *table.shape[2:])
        return _einsum(spec, x, jnp.broadcast_to(table, shape))


class Diagonals(NamedTuple):
    """Products with tables of `n = queries + keys - 1` descending distances.

    Tables are `[h n]` and `[h n d]`; one head serves all where `h` is 1. `laid` holds
    tables and what `bias` returns for them, where that is known already.
    """

    queries: int
    keys: int
    laid: tuple[tuple[jax.Array, jax.Array], ...] = ()

    def bias(self, table):
        """Returns `t[i - j]` as `[1 h q k]`."""
        for known, bias in self.laid:
            if table is known:
                return bias
        return spread(table, self.queries)[None]

    def query_dot(self, q, table):
        """Returns `q_i . t[i - j]` as `[b h q k]`."""
        return _skewed_dot(q, table)

    def key_dot(self, k, table):
        """Returns `k_j . t[i - j]` as `[b h q k]`."""
        # Read the distances upwards and let keys play the queries' part.
        return _skewed_dot(k, table[:, ::-1]).mT

    def weighted(self, weights, table):
        """Returns `sum_j w_ij t[i - j]` as `[b h q d]`."""
        if table.shape[0] == 1:  # one product for all heads
            rows = _windows(table, weights.shape[2], weights.shape[2])[0, 0]
            return _einsum("bhqn,nd->bhqd", unshift(weights, more=1), rows)
        batch, heads, queries, keys = weights.shape
        step = _group(queries)
        weights = weights.reshape(batch, heads, queries // step, step, keys)
        rows = _windows(table, queries, step)
        out = pairwise.sums(unshift(weights, more=1), rows.astype(weights.dtype))
        return out.reshape(batch, heads, queries, -1)


class Uniform(NamedTuple):
    """Products with one row for all pairs, where every distance has the same one.

    Tables are `[h 1]` and `[h 1 d]`, `h` 1 where heads share them.
    """

    queries: int
    keys: int

    def bias(self, table):
        """Returns `t` as `[1 h q k]`."""
        shape = (1, table.shape[0], self.queries, self.keys)
        return jnp.broadcast_to(table[None, :, :, None], shape)

    def query_dot(self, q, table):
        """Returns `q_i . t` as `[b h q k]`."""
        scores = self._dot("bhqd,hd->bhq", q, table)[..., None]
        return jnp.broadcast_to(scores, (*scores.shape[:3], self.keys))

    def key_dot(self, k, table):
        """Returns `k_j . t` as `[b h q k]`."""
        scores = self._dot("bhkd,hd->bhk", k, table)[:, :, None]
        batch, heads, _, keys = scores.shape
        return jnp.broadcast_to(scores, (batch, heads, self.queries, keys))

    def weighted(self, weights, table):
        """Returns `sum_j w_ij t` as `[b h q d]`."""
        return jnp.sum(weights, axis=-1, keepdims=True) * table[None]

    def _dot(self, spec, x, table):
        heads = x.shape[1]
        return _einsum(
            spec, x, jnp.broadcast_to(table, (heads, *table.shape[1:]))[:, 0]
        )


class Joined(NamedTuple):
    """Products with tables of a row for each pair with the first keys, then diagonals.

    Tables are `[h n]` and `[h n d]` with `n = batch * queries * free + queries + rest -
    1` rows: those of the pairs in the order `b q k`, then the descending distances of
    the other `rest` keys.
    """

    batch: int
    queries: int
    free: int
    rest: int

    def bias(self, table):
        """Returns `t[i - j]` as `[b h q k]`."""
        first, rest = self._split(table)
        shape = (self.batch, table.shape[0], self.queries, self.rest)
        rest = jnp.broadcast_to(self._diagonals.bias(rest), shape)
        return jnp.concatenate([first, rest], axis=-1)

    def query_dot(self, q, table):
        """Returns `q_i . t[i - j]` as `[b h q k]`."""
        first, rest = self._split(table)
        near = self._diagonals.query_dot(q, rest)
        return jnp.concatenate([Pairs().query_dot(q, first), near], axis=-1)

    def key_dot(self, k, table):
        """Returns `k_j . t[i - j]` as `[b h q k]`."""
        first, rest = self._split(table)
        far = Pairs().key_dot(k[:, :, : self.free], first)
        near = self._diagonals.key_dot(k[:, :, self.free :], rest)
        return jnp.concatenate([far, near], axis=-1)

    def weighted(self, weights, table):
        """Returns `sum_j w_ij t[i - j]` as `[b h q d]`."""
        first, rest = self._split(table)
        far = Pairs().weighted(weights[..., : self.free], first)
        return far + self._diagonals.weighted(weights[..., self.free :], rest)

    @property
    def _diagonals(self):
        return Diagonals(self.queries, self.rest)

    def _split(self, table):
        """Returns the pairs' rows, `[b h q k]` or `[b h q k d]`, and the others'."""
        shape = (self.batch, self.queries, self.free)
        count = self.batch * self.queries * self.free
        first = table[:, :count].reshape(table.shape[0], *shape, *table.shape[2:])
        return jnp.moveaxis(first, 0, 1), table[:, count:]


def _group(queries: int) -> int:
    """Returns how many queries to multiply with one window of a table.

    A window has `keys + group - 1` rows, all of which each of its queries meets and
    `keys` of which it needs: small groups waste less, large ones multiply faster.
    """
    return GROUP if queries % GROUP == 0 else queries


def _windows(table, queries: int, step: int):
    """Cuts a table `[h n d]` into the windows of groups of queries, `[h g m d]`.

    Behind each is a row that none of its queries meets: products of an even number of
    rows, which `keys + step` is for blocks, run up to twice as fast.
    """
    size = table.shape[1] - queries + step + 1
    table = jnp.pad(table, ((0, 0), (0, 1), (0, 0)))
    starts = range(queries - step, -1, -step)
    return jnp.stack([table[:, start : start + size] for start in starts], axis=1)


def _skewed_dot(x, table):
    """Returns `x_i . t[r]` as `[b h q k]`, `r` the row of query `i` and key `j`."""
    if table.shape[0] == 1:  # one product for all heads
        rows = _windows(table, x.shape[2], x.shape[2])[0, 0]
        return shift(_einsum("bhqd,nd->bhqn", x, rows), more=1)
    batch, heads, queries, width = x.shape
    step = _group(queries)
    rows = _windows(table, queries, step)
    x = x.reshape(batch, heads, queries // step, step, width)
    scores = shift(pairwise.scores(x, rows.astype(x.dtype)), more=1)
    return scores.reshape(batch, heads, queries, -1)

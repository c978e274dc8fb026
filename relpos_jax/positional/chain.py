"""Several encodings at once, each acting where it acts."""

import dataclasses
import math

import jax
from jaxtyping import Array, Float, Num

from relpos_jax.positional.protocol import Block, Dims, Params, PositionEncoding
from relpos_jax.relative import Layout
from relpos_jax.where import Where


@dataclasses.dataclass(frozen=True)
class Chain(PositionEncoding):
    """Applies the parts' hooks in order; the parameters of part `i` are under `str(i)`.

    Order matters: what adds to queries (Transformer-XL's `u`) belongs before what
    rotates them, since an unrotated vector against rotated keys sees their positions.

    Raises:
      ValueError: no parts, or parts that scale the logits differently from one another
        and from 1/sqrt(d).
    """

    parts: tuple[PositionEncoding, ...] = ()

    def __post_init__(self):
        object.__setattr__(self, "parts", tuple(self.parts))
        if not self.parts:
            raise ValueError("a chain needs at least one part")
        self.scale(64)

    @property
    def absolute(self) -> bool:
        return any(part.absolute for part in self.parts)

    @property
    def invariant(self) -> bool:
        return all(part.invariant for part in self.parts)

    @property
    def causal_only(self) -> bool:
        return any(part.causal_only for part in self.parts)

    @property
    def ordinal(self) -> bool:
        with_positions = [p for p in self.parts if type(p) is not PositionEncoding]
        return bool(with_positions) and all(part.ordinal for part in with_positions)

    @property
    def whole_rows(self) -> bool:
        return any(part.whole_rows for part in self.parts)

    @property
    def length_dependent(self) -> bool:
        return any(part.length_dependent for part in self.parts)

    @property
    def turns_once(self) -> bool:
        with_positions = [p for p in self.parts if type(p) is not PositionEncoding]
        return all(part.turns_once for part in with_positions)

    def _init(self, method: str, key: jax.Array, dims: Dims) -> Params:
        params = {}
        for i, part in enumerate(self.parts):
            own = getattr(part, method)(jax.random.fold_in(key, i), dims)
            if own:
                params[str(i)] = own
        return params

    def init(self, key: jax.Array, dims: Dims) -> Params:
        return self._init("init", key, dims)

    def init_shared(self, key: jax.Array, dims: Dims) -> Params:
        return self._init("init_shared", key, dims)

    def constants(self, heads: int, head_dim: int) -> Params:
        parts = (part.constants(heads, head_dim) for part in self.parts)
        return {str(i): own for i, own in enumerate(parts) if own}

    def _each(self, params: Params):
        return [(part, params.get(str(i), {})) for i, part in enumerate(self.parts)]

    def _views(self, params: Params, block: Block):
        """Yields each part with its parameters and its own view of the block."""
        data = zip(block.table, block.q_data, block.k_data, strict=True)
        for (part, own), (table, q_data, k_data) in zip(
            self._each(params), data, strict=True
        ):
            view = block._replace(table=table, q_data=q_data, k_data=k_data)
            yield part, own, view

    def scale(self, head_dim: int) -> float:
        usual = PositionEncoding().scale(head_dim)
        scales = [part.scale(head_dim) for part in self.parts]
        special = {s for s in scales if not math.isclose(s, usual)}
        if len(special) > 1:
            raise ValueError(f"parts want different scales of the logits: {scales}")
        return special.pop() if special else usual

    def query_gain(self, head_dim: int) -> float:
        return math.prod(part.query_gain(head_dim) for part in self.parts)

    def embed(
        self, params: Params, x: Float[Array, "b t w"], at: Where
    ) -> Float[Array, "b t w"]:
        for part, own in self._each(params):
            x = part.embed(own, x, at)
        return x

    def enter(
        self, params: Params, x: Float[Array, "b t w"], at: Where
    ) -> Float[Array, "b t w"]:
        for part, own in self._each(params):
            x = part.enter(own, x, at)
        return x

    def features(
        self, params: Params, x: Float[Array, "b t w"]
    ) -> Float[Array, "b t h f"] | None:
        found = [part.features(own, x) for part, own in self._each(params)]
        found = [features for features in found if features is not None]
        if len(found) > 1:
            raise ValueError("only one part of a chain may have features")
        return found[0] if found else None

    def prepare(
        self,
        params: Params,
        features: Float[Array, "b k h f"] | None,
        q_at: Where,
        k_at: Where,
        layout: Layout | None,
    ):
        prepared, q_data, k_data = {}, [], []
        for i, (part, own) in enumerate(self._each(params)):
            own, q_part, k_part = part.prepare(own, features, q_at, k_at, layout)
            prepared[str(i)] = own
            q_data.append(q_part)
            k_data.append(k_part)
        return prepared, tuple(q_data), tuple(k_data)

    def query(
        self, params: Params, q: Float[Array, "b t h d"], at: Where
    ) -> Float[Array, "b t h d"]:
        for part, own in self._each(params):
            q = part.query(own, q, at)
        return q

    def key(
        self, params: Params, k: Float[Array, "b t h d"], at: Where
    ) -> Float[Array, "b t h d"]:
        for part, own in self._each(params):
            k = part.key(own, k, at)
        return k

    def saturation(self) -> int | None:
        tables = [p for p in self.parts if type(p).table is not PositionEncoding.table]
        ends = [part.saturation() for part in tables]
        return None if not ends or None in ends else max(ends)

    def table(self, params: Params, distance: Num[Array, "*n"]):
        return tuple(part.table(own, distance) for part, own in self._each(params))

    def score(self, params: Params, block: Block) -> Float[Array, "b h q k"]:
        logits = block.logits
        for part, own, view in self._views(params, block):
            logits = part.score(own, view._replace(logits=logits))
        return logits

    def value(
        self, params: Params, weights: Float[Array, "b h q k"], block: Block
    ) -> Float[Array, "b h q d"] | None:
        total = None
        for part, own, view in self._views(params, block):
            added = part.value(own, weights, view)
            if added is not None:
                total = added if total is None else total + added
        return total

    def past_training(self) -> str:
        return " ".join(part.past_training() for part in self.parts)

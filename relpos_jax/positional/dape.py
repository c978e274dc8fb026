"""DAPE: data-adaptive positional encoding (Zheng et al. 2024)."""

import dataclasses

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Num

from relpos_jax.positional.kerple import KerpleLog
from relpos_jax.positional.protocol import (
    Block,
    Dims,
    Params,
    PositionEncoding,
    leading,
)
from relpos_jax.positional.wrapper import Wrapper
from relpos_jax.relative import Layout
from relpos_jax.where import Where


def adapt(
    params: Params,
    logits: Float[Array, "b h q k"],
    bias: Float[Array, "b h q k"],
    slope: float = 0.01,
) -> Float[Array, "b h q k"]:
    """Returns `f(A, B)`: an MLP over the heads of a pair's logits and biases.

    `W_2 leaky_relu(W_1 [A; B] + b_1) + b_2`, the same for every pair.

    Args:
      params: `inner [2h f]`, `inner_bias [f]`, `outer [f h]`, `outer_bias [h]`.
      logits: `A`, the scaled products of queries and keys.
      bias: `B`.
      slope: of the leaky ReLU's negative side.
    """
    both = jnp.concatenate([logits, bias], axis=1)
    hidden = jnp.einsum("bnqk,nf->bfqk", both, params["inner"])
    hidden = jax.nn.leaky_relu(hidden + _per_head(params["inner_bias"]), slope)
    out = jnp.einsum("bfqk,fh->bhqk", hidden, params["outer"])
    return out + _per_head(params["outer_bias"])


def _per_head(x):
    return leading(x[:, None, None], 4)


@dataclasses.dataclass(frozen=True)
class Dape(Wrapper):
    """Adds `f(A, B)` to the logits `A + B` of another encoding, with `B` its bias.

    Every head's bias may thereby depend on all heads' content at the pair. The MLP is
    evaluated for every pair: `3 h f` multiplications each.

    The paper starts from `A + f(A, B)` and arrives at `A + B + f(A, B)`, which is what
    its experiments and its released code have, and what is here.

    Parameters: the inner encoding's under `inner`, the MLP's under `mlp` (a layer's
    own).

    Attributes:
      inner: an encoding that adds a bias, such as KERPLE (the paper's best) or ALiBi.
      hidden: units of the MLP (paper: 32).
    """

    inner: PositionEncoding = KerpleLog()
    hidden: int = 32

    def __post_init__(self):
        if self.hidden < 1:
            raise ValueError(f"hidden must be positive, got {self.hidden}")

    @property
    def causal_only(self) -> bool:
        return self.inner.causal_only

    def of_inner(self, params: Params) -> Params:
        return params.get("inner", {})

    def init(self, key: jax.Array, dims: Dims) -> Params:
        first, second, rest = jax.random.split(key, 3)
        heads, hidden = dims.heads, self.hidden
        mlp = {
            "inner": (2 * heads) ** -0.5
            * jax.random.normal(first, (2 * heads, hidden)),
            "inner_bias": jnp.zeros(hidden),
            "outer": 0.02 * jax.random.normal(second, (hidden, heads)),
            "outer_bias": jnp.zeros(heads),
        }
        return {"mlp": mlp, **_nested(self.inner.init(rest, dims))}

    def init_shared(self, key: jax.Array, dims: Dims) -> Params:
        return _nested(self.inner.init_shared(key, dims))

    def constants(self, heads: int, head_dim: int) -> Params:
        return _nested(self.inner.constants(heads, head_dim))

    def prepare(
        self,
        params: Params,
        features: Float[Array, "b k h f"] | None,
        q_at: Where,
        k_at: Where,
        layout: Layout | None,
    ):
        own, *data = super().prepare(params, features, q_at, k_at, layout)
        return {**params, "inner": own}, *data

    def table(self, params: Params, distance: Num[Array, "*n"]):
        return self.inner.table(self.of_inner(params), distance)

    def score(self, params: Params, block: Block) -> Float[Array, "b h q k"]:
        total = super().score(params, block)
        mlp = jax.tree.map(lambda x: x.astype(jnp.float32), params["mlp"])
        return total + adapt(mlp, block.logits, total - block.logits)

    def past_training(self) -> str:
        return f"{self.inner.past_training()} Content may change that."


def _nested(params: Params) -> Params:
    return {"inner": params} if params else {}

"""KERPLE: kernelised relative positions (Chi et al. 2022, section 4)."""

import dataclasses
from typing import ClassVar

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Num

from relpos_jax.positional.protocol import (
    Block,
    Dims,
    Params,
    PositionEncoding,
    leading,
)

POSITIVE = ("clamp", "smooth")


def log_kernel(
    distance: Num[Array, "*n"],
    p: Float[Array, " h"],
    a: Float[Array, " h"],
    exponent: Float[Array, " h"] | None = None,
) -> Float[Array, "*n h"]:
    """Returns `-p log(1 + a |distance|)` (the logarithmic variant).

    Args:
      distance: distances; the sign does not matter.
      p, a: the paper's `r_1` and `r_2`, positive.
      exponent: of the distance; not in the paper (NVIDIA NeMo's generalisation).
    """
    far = jnp.abs(distance).astype(jnp.float32)[..., None]
    if exponent is not None:
        far = _power(far, leading(exponent, far.ndim))
    return -leading(p, far.ndim) * jnp.log1p(leading(a, far.ndim) * far)


def power_kernel(
    distance: Num[Array, "*n"], a: Float[Array, " h"], p: Float[Array, " h"]
) -> Float[Array, "*n h"]:
    """Returns `-a |distance|^p` (the power variant), with `0 < p <= 2`."""
    far = jnp.abs(distance).astype(jnp.float32)[..., None]
    return -leading(a, far.ndim) * _power(far, leading(p, far.ndim))


def _power(x, p):
    """Returns `x^p` for `x >= 0` and `p > 0`, with gradient 0 at `x = 0`."""
    positive = x > 0
    return jnp.where(positive, jnp.exp(p * jnp.log(jnp.where(positive, x, 1.0))), 0.0)


def limit(
    x: Float[Array, " h"], low: float, high: float | None = None
) -> Float[Array, " h"]:
    """Returns `x` kept within `low .. high`, with gradient 1 everywhere.

    The released code writes the clamped values back into the parameters before each
    use, so their gradient never stops. A caller's own parameters stay as they are here;
    the function and its gradient are the same.
    """
    return x + jax.lax.stop_gradient(jnp.clip(x, low, high) - x)


@dataclasses.dataclass(frozen=True)
class Kerple(PositionEncoding):
    """What both kernels have in common; not an encoding by itself.

    Attributes:
      positive: how parameters stay positive. "clamp" keeps them from `eps` up, and the
        power's exponent within `eps .. 2`, as the released code does (see `limit`);
        "smooth" takes a softplus, and twice a sigmoid for the exponent.
      eps: the smallest value of "clamp".
      share: one set of parameters for all layers, as in the released code.
      symmetric: use `|distance|`, for bidirectional attention. Otherwise keys after the
        query get the bias of distance 0.
    """

    turns_once: ClassVar[bool] = True

    positive: str = "clamp"
    eps: float = 0.01
    share: bool = True
    symmetric: bool = False

    def __post_init__(self):
        if self.positive not in POSITIVE:
            raise ValueError(
                f"positive must be one of {POSITIVE}, got {self.positive!r}"
            )
        if self.eps <= 0:
            raise ValueError(f"eps must be positive, got {self.eps}")

    def ranges(self) -> dict[str, float]:
        """Returns the names of the parameters and the top of their initial values."""
        raise NotImplementedError("use KerpleLog or KerplePower")

    def _init(self, key: jax.Array, dims: Dims) -> Params:
        params = {}
        for i, (name, high) in enumerate(self.ranges().items()):
            own = jax.random.fold_in(key, i)
            x = jax.random.uniform(own, (dims.heads,), maxval=high)
            if self.positive == "smooth":
                x = jnp.maximum(x, self.eps)
                x = (
                    jnp.log(x / (2.0 - x))
                    if name in EXPONENTS
                    else jnp.log(jnp.expm1(x))
                )
            params[name] = x
        return params

    def init(self, key: jax.Array, dims: Dims) -> Params:
        return {} if self.share else self._init(key, dims)

    def init_shared(self, key: jax.Array, dims: Dims) -> Params:
        return self._init(key, dims) if self.share else {}

    def value_of(self, params: Params, name: str) -> Float[Array, " h"]:
        """Returns a parameter in the range where its kernel is one."""
        x = params[name].astype(jnp.float32)
        if self.positive == "clamp":
            return limit(x, self.eps, 2.0 if name in EXPONENTS else None)
        return 2.0 * jax.nn.sigmoid(x) if name in EXPONENTS else jax.nn.softplus(x)

    def _far(self, distance):
        return jnp.abs(distance) if self.symmetric else jnp.maximum(distance, 0)


EXPONENTS = ("bias_p", "weight_p")


@dataclasses.dataclass(frozen=True)
class KerpleLog(Kerple):
    """Adds `log_kernel` of the distance; parameters `p` and `a`, `[h]`.

    Initial values are uniform in 0..2 and 0..1. The bias is not scaled by 1/sqrt(d).
    """

    def ranges(self) -> dict[str, float]:
        return {"p": 2.0, "a": 1.0}

    def table(
        self, params: Params, distance: Num[Array, "*n"]
    ) -> Float[Array, "*n h"] | None:
        p, a = (self.value_of(params, name) for name in "pa")
        return log_kernel(self._far(distance), p, a)

    def score(self, params: Params, block: Block) -> Float[Array, "b h q k"]:
        return block.logits + block.rel.bias(block.table)

    def past_training(self) -> str:
        return "Far keys fade ever more slowly: the penalty grows as a logarithm."


@dataclasses.dataclass(frozen=True)
class KerplePower(Kerple):
    """Adds `power_kernel` of the distance; parameters `bias_a` and `bias_p`, `[h]`.

    The released code can also multiply the logits by `exp(-a d^p)` of the distance,
    with parameters of their own. Left out parameters are 1.

    Attributes:
      bias: which parameters the bias has: "ap" (the paper), "a", "p", or "" for none.
      weight: which parameters the factor has; "" for none (the paper).
    """

    bias: str = "ap"
    weight: str = ""

    def __post_init__(self):
        super().__post_init__()
        for name in ("bias", "weight"):
            if getattr(self, name) not in ("", "a", "p", "ap"):
                raise ValueError(
                    f"{name} must be '', 'a', 'p' or 'ap', got {getattr(self, name)!r}"
                )
        if not self.bias and not self.weight:
            raise ValueError("a kernel needs a bias or a weight")

    def ranges(self) -> dict[str, float]:
        letters = {"bias": self.bias, "weight": self.weight}
        high = {"a": 1.0, "p": 2.0}
        return {f"{part}_{x}": high[x] for part in letters for x in letters[part]}

    def _kernel(self, params, far, part):
        letters = getattr(self, part)
        heads = len(next(iter(params.values())))
        a, p = (
            self.value_of(params, f"{part}_{x}") if x in letters else jnp.ones(heads)
            for x in "ap"
        )
        return power_kernel(far, a, p)

    def table(self, params: Params, distance: Num[Array, "*n"]) -> Params:
        own = {name: params[name] for name in self.ranges()}
        far, rows = self._far(distance), {}
        if self.bias:
            rows["bias"] = self._kernel(own, far, "bias")
        if self.weight:
            rows["weight"] = jnp.exp(self._kernel(own, far, "weight"))
        return rows

    def score(self, params: Params, block: Block) -> Float[Array, "b h q k"]:
        logits = block.logits
        if self.weight:
            logits = logits * block.rel.bias(block.table["weight"])
        if self.bias:
            logits = logits + block.rel.bias(block.table["bias"])
        return logits

    def past_training(self) -> str:
        return "Far keys fade: the penalty grows as a power of the distance, up to 2."

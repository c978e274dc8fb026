"""Longer contexts for rotary embeddings: changes of the frequencies, as one family.

The formulas are in `rope_frequencies`, whose letters hold here too; `rope_checkpoint`
reads the dictionaries that checkpoints carry.
"""

import dataclasses
import difflib
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Num

from relpos_jax.positional.rope_frequencies import (
    correction_range,
    dimension_ramp,
    dynamic_ntk_stretch,
    inverse_frequencies,
    llama3_frequencies,
    longrope_attention_factor,
    ntk_exponents,
    turns_ramp,
    yarn_attention_factor,
)

RAMPS = ("dimension", "turns")

# For each kind: fields that must be set, and fields that may be.
FIELDS = {
    "linear": (("factor",), ()),
    "ntk": (("factor",), ()),
    "dynamic_ntk": (("factor", "original_length"), ()),
    "ntk_by_parts": (
        ("factor", "original_length"),
        ("beta_fast", "beta_slow", "ramp", "truncate"),
    ),
    "part_ntk": (("factor", "original_length"), ()),
    "yarn": (
        ("factor", "original_length"),
        (
            *("beta_fast", "beta_slow", "ramp", "truncate", "extrapolation_factor"),
            *("attention_factor", "mscale", "mscale_all_dim"),
        ),
    ),
    "longrope": (
        ("factor", "original_length"),
        ("short_factor", "long_factor", "attention_factor", "start_tokens"),
    ),
    "llama3": (
        ("factor", "original_length", "low_freq_factor", "high_freq_factor"),
        (),
    ),
}
FOLLOW_LENGTH = ("linear", "ntk_by_parts", "part_ntk", "yarn")  # may be dynamic


def hint(word: str, known) -> str:
    """Returns a hint naming the known word nearest to a wrong one, or all of them."""
    close = difflib.get_close_matches(str(word), known, n=1, cutoff=0.5)
    return f"did you mean {close[0]!r}?" if close else f"known: {', '.join(known)}"


@dataclasses.dataclass(frozen=True)
class RopeScaling:
    """One way of stretching rotary embeddings, with the numbers that it needs.

    Attributes:
      kind: "linear": `theta / s`, Position Interpolation (Chen et al. 2023, equation
        4). "ntk": `theta_i / s^(2i/(d-2))`, NTK-aware (bloc97 2023). "dynamic_ntk": the
        same with `max(1, s l/L - (s-1))` for `s` (emozilla 2023). "ntk_by_parts":
        `theta (gamma + (1 - gamma) / s)` (Peng et al. 2023, definition 2). "yarn": the
        same with an attention factor (definition 3). "part_ntk": an older blend of
        linear, NTK and unchanged in the same authors' code, in no paper. "longrope":
        `theta_i / lambda_i` (Ding et al. 2024, equation 1) with one set of `lambda` up
        to the length `L` and another past it. "llama3": see `llama3_frequencies`.
      factor: `s`, at least 1. For "longrope" it only sets the attention factor.
      original_length: `L`, the length in training before stretching.
      dynamic: `max(1, l/L)` takes the place of `s` (Peng et al. 2023, section 3.3); not
        with `factor`. For "longrope", `1 + (lambda - 1) (l/L - 1) / (s - 1)` takes the
        place of `lambda` (Microsoft's released code).
      length: take this for `l` whatever the document: one table for a whole run, for
        kinds that depend on the length. Decoding token by token is then exactly the
        full pass, in every layer. None for the document's own length.
      beta_fast, beta_slow: turns in `L` positions above which a plane stays as it is
        and below which it is divided by `s`; None for 32 and 1.
      ramp: "turns", linear in the number of turns (the paper; default of
        "ntk_by_parts"), or "dimension", linear in the plane's index (the released code;
        default of "yarn", since checkpoints are trained with it).
      truncate: round the ends of the "dimension" ramp to whole planes; None for True.
      extrapolation_factor: multiplies `gamma`; None for 1.
      attention_factor: multiplies cosine and sine, so logits grow by its square; None
        for the kind's own rule, and then it is taken once.
      mscale, mscale_all_dim: the rule's slopes in numerator and denominator (DeepSeek);
        None for the paper's rule.
      short_factor, long_factor: `lambda`, one number a plane; empty for all 1 (short)
        and all `s` (long), which is Position Interpolation past `L`.
      start_tokens: positions below it are not stretched (`n` hat of Ding et al.); with
        it scores depend on more than distances.
      low_freq_factor, high_freq_factor: turns below which planes of "llama3" are
        divided, and above which they stay.

    Raises:
      ValueError: an unknown kind; a field missing, out of range, or set where the kind
        does not read it.
    """

    kind: str = "linear"
    factor: float | None = None
    original_length: int | None = None
    dynamic: bool = False
    length: int | None = None
    beta_fast: float | None = None
    beta_slow: float | None = None
    ramp: str | None = None
    truncate: bool | None = None
    extrapolation_factor: float | None = None
    attention_factor: float | None = None
    mscale: float | None = None
    mscale_all_dim: float | None = None
    short_factor: tuple[float, ...] = ()
    long_factor: tuple[float, ...] = ()
    start_tokens: int = 0
    low_freq_factor: float | None = None
    high_freq_factor: float | None = None

    def __post_init__(self):
        if self.kind not in FIELDS:
            raise ValueError(
                f"unknown rope scaling {self.kind!r}; {hint(self.kind, FIELDS)}"
            )
        needed, optional = FIELDS[self.kind]
        if self.dynamic and self.kind in FOLLOW_LENGTH:
            needed = ("original_length",)
        elif self.dynamic and self.kind != "longrope":
            raise ValueError(
                f"{self.kind!r} cannot be dynamic; 'dynamic_ntk' and dynamic "
                f"{FOLLOW_LENGTH} follow the length"
            )
        for field in dataclasses.fields(self):
            name, value = field.name, getattr(self, field.name)
            unset = value is None or value == field.default
            if name in needed and unset:
                raise ValueError(f"rope scaling {self.kind!r} needs {name!r}")
            always = ("kind", "dynamic", "length")
            if not unset and name not in (*needed, *optional, *always):
                dynamic = "dynamic " if self.dynamic else ""
                raise ValueError(
                    f"{dynamic}rope scaling {self.kind!r} does not read {name!r}, got "
                    f"{value!r}; it reads {(*needed, *optional)}"
                )
        if self.length is not None and not self._follows_length:
            raise ValueError(
                f"{self.kind!r} does not depend on a length: unset 'length'"
            )
        limits = {"factor": 1, "original_length": 2, "start_tokens": 0, "length": 1}
        for name, least in limits.items():
            value = getattr(self, name)
            if value is not None and value < least:
                raise ValueError(f"{name!r} must be at least {least}, got {value}")
        for name in ("attention_factor", "mscale", "mscale_all_dim"):
            if getattr(self, name) is not None and not getattr(self, name) > 0:
                raise ValueError(
                    f"{name!r} must be positive, got {getattr(self, name)}"
                )
        if min((*self.short_factor, *self.long_factor, 1.0)) <= 0:
            raise ValueError("'short_factor' and 'long_factor' must be positive")
        low, high = self.low_freq_factor, self.high_freq_factor
        if self.kind == "llama3" and not 0 < low < high:
            raise ValueError(
                f"'low_freq_factor' must be positive and below 'high_freq_factor', "
                f"got {low} and {high}"
            )
        fast, slow = self._betas()
        if not 0 < slow < fast:
            raise ValueError(
                f"'beta_slow' must be positive and below 'beta_fast', "
                f"got {slow} and {fast}"
            )
        if self.ramp not in (None, *RAMPS):
            raise ValueError(f"'ramp' must be one of {RAMPS}, got {self.ramp!r}")
        if self.truncate is not None and self._ramp() == "turns":
            raise ValueError("'truncate' rounds planes: it needs ramp='dimension'")
        if (self.mscale is None) != (self.mscale_all_dim is None):
            raise ValueError(
                "'mscale' and 'mscale_all_dim' come together or not at all"
            )
        if self.mscale is not None and self.attention_factor is not None:
            raise ValueError("'attention_factor' contradicts 'mscale': set one of them")
        if self.dynamic and self.kind == "longrope":
            if self.short_factor or self.factor <= 1:
                raise ValueError(
                    "dynamic longrope has one set of factors: set 'long_factor', not "
                    "'short_factor', and a 'factor' above 1"
                )

    def _betas(self) -> tuple[float, float]:
        fast = 32.0 if self.beta_fast is None else self.beta_fast
        return fast, 1.0 if self.beta_slow is None else self.beta_slow

    def _ramp(self) -> str:
        return self.ramp or ("turns" if self.kind == "ntk_by_parts" else "dimension")

    @property
    def length_dependent(self) -> bool:
        """Whether frequencies change with the length of the document."""
        return self._follows_length and self.length is None

    @property
    def _follows_length(self) -> bool:
        same = self.short_factor == self.long_factor != ()
        return (
            self.dynamic
            or self.kind == "dynamic_ntk"
            or (self.kind == "longrope" and not same)
        )

    def stretch(self, length: Num[Array, "*n"] | None = None):
        """Returns `s` for documents of this length: a number, or `[*n]` float32."""
        if self.kind == "dynamic_ntk":
            if self.length is not None:
                past = max(self.length - self.original_length, 0)
                return 1.0 + self.factor * past / self.original_length
            if length is None:
                return 1.0
            return dynamic_ntk_stretch(length, self.original_length, self.factor)
        if self.dynamic and self.kind != "longrope":
            if self.length is not None:
                return max(self.length / self.original_length, 1.0)
            if length is None:
                return 1.0
            past = length.astype(jnp.float32) / self.original_length
            return jnp.maximum(past, 1.0)
        return self.factor

    def frequencies(
        self,
        dim: int,
        base: float = 10000.0,
        length: Num[Array, "*n"] | None = None,
    ) -> Float[np.ndarray, " f"] | Float[Array, "*n f"]:
        """Returns the changed `theta_i`: constants, float64, or by length, float32.

        Args:
          dim: `d`, the number of features that turn.
          base: of the unchanged frequencies.
          length: `l`, for kinds that depend on it; None for at most `L`.

        Raises:
          ValueError: factors of LongRoPE for another number of planes.
        """
        s = self.stretch(length)
        if isinstance(s, jax.Array):
            s = s[..., None]
        theta = inverse_frequencies(dim, base)
        if self.length_dependent and length is not None:
            theta = _behind(theta.astype(np.float32), length.ndim + 1)
        return self._changed(theta, dim, base, s, length)

    def _changed(self, theta, dim, base, s, length):
        if self.kind == "linear":
            return theta / s
        if self.kind in ("ntk", "dynamic_ntk"):
            return theta * _power(s, -ntk_exponents(dim))
        if self.kind == "llama3":
            low, high = self.low_freq_factor, self.high_freq_factor
            return llama3_frequencies(theta, s, self.original_length, low, high)
        if self.kind == "longrope":
            return theta / self._factors(dim, length)
        if self.kind == "part_ntk":
            return self._part_ntk(theta, dim, base, s)
        fast, slow = self._betas()
        if self._ramp() == "turns":
            plain = inverse_frequencies(dim, base)
            gamma = turns_ramp(plain, self.original_length, fast, slow)
        else:
            truncate = self.truncate is not False
            gamma = self._dimension_ramp(dim, base, fast, slow, truncate)
        if self.extrapolation_factor is not None:
            gamma = gamma * self.extrapolation_factor
        gamma = _behind(gamma, theta.ndim)
        return theta * (gamma + (1 - gamma) / s)

    def _dimension_ramp(self, dim, base, fast, slow, truncate=True):
        ends = correction_range(
            dim, base, self.original_length, fast, slow, truncate=truncate
        )
        return dimension_ramp(dim, *ends)

    def _part_ntk(self, theta, dim, base, s):
        """Linear for slow planes, NTK around one turn, unchanged for fast planes."""
        one_turn = _behind(self._dimension_ramp(dim, base, 1.25, 0.75), theta.ndim)
        many_turns = _behind(self._dimension_ramp(dim, base, 16.0, 2.0), theta.ndim)
        ntk = _power(s, -ntk_exponents(dim))
        ratio = (1 - one_turn) / s + one_turn * ntk
        return theta * ((1 - many_turns) * ratio + many_turns)

    def _factors(self, dim, length):
        """Returns `lambda` as `[f]`, or `[*n f]` where it follows the length."""
        planes = dim // 2
        short = self.short_factor or (1.0,) * planes
        long = self.long_factor or (self.factor,) * planes
        for name, factors in (("short_factor", short), ("long_factor", long)):
            if len(factors) != planes:
                raise ValueError(
                    f"{name!r} has {len(factors)} numbers, but {planes} planes turn"
                )
        short, long = np.asarray(short), np.asarray(long)
        if self.length is not None:
            length, largest, choose = np.asarray([self.length]), np.maximum, np.where
        elif not self.length_dependent or length is None:
            return short
        else:
            length, largest, choose = length[..., None], jnp.maximum, jnp.where
            short, long = (
                _behind(x.astype(np.float32), length.ndim) for x in (short, long)
            )
        if self.dynamic:
            past = largest(length / self.original_length - 1, 0.0)
            return 1 + (long - 1) * (past / (self.factor - 1))
        return choose(length > self.original_length, long, short)

    def amplitude(self, length: Num[Array, "*n"] | None = None):
        """Returns the factor of cosine and sine: a number, or `[*n]`."""
        if self.attention_factor is not None:
            return self.attention_factor
        if self.kind == "longrope":
            return longrope_attention_factor(self.factor, self.original_length)
        if self.kind != "yarn":
            return 1.0
        s = self.stretch(length)
        if self.mscale is None:
            return yarn_attention_factor(s)
        above = yarn_attention_factor(s, self.mscale)
        return above / yarn_attention_factor(s, self.mscale_all_dim)

    def past_training(self) -> str:
        """Says in a sentence what happens past the training length."""
        if self.length_dependent:
            return "Phases follow the document's length, and change when it grows."
        if self.kind == "longrope":
            return "Phases are stretched by lambda whatever the length."
        return f"Phases up to {self.factor} times the training length are as trained."


def scaling_of(fields: Any) -> RopeScaling:
    """Returns the scaling that a dict (or ConfigDict) of its fields describes.

    Takes integers for floats and lists for tuples.

    Raises:
      ValueError: it is no dict, or has a key that `RopeScaling` does not have.
    """
    try:
        values = dict(fields)
    except (TypeError, ValueError):
        raise ValueError(
            f"scaling must be a RopeScaling or a dict of its fields, got {fields!r}"
        ) from None
    known = {field.name: str(field.type) for field in dataclasses.fields(RopeScaling)}
    for name, value in values.items():
        if name not in known:
            raise ValueError(f"rope scaling has no field {name!r}; {hint(name, known)}")
        if isinstance(value, (list, tuple)):
            values[name] = tuple(float(x) for x in value)
        elif isinstance(value, int) and "float" in known[name]:
            values[name] = float(value)
    return RopeScaling(**values)


def _behind(x: np.ndarray, ndim: int) -> np.ndarray:
    """Returns `[f]` behind axes of 1 up to `ndim` axes."""
    return x.reshape((1,) * (ndim - 1) + (-1,))


def _power(s, exponents: Float[np.ndarray, " f"]):
    """Returns `s^e`, with the planes as a last axis behind an array's own."""
    if not isinstance(s, jax.Array):
        return s**exponents
    exponents = _behind(exponents.astype(np.float32), s.ndim)
    return jnp.exp(exponents * jnp.log(s))

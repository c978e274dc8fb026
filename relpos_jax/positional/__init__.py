"""Position encodings, one file a paper or family, and their registry."""

import dataclasses
import difflib
from collections.abc import Mapping
from typing import Any

from relpos_jax.positional.alibi import Alibi
from relpos_jax.positional.chain import Chain
from relpos_jax.positional.continuous_bias import ContinuousBias
from relpos_jax.positional.cope import Cope
from relpos_jax.positional.dape import Dape
from relpos_jax.positional.deberta import Deberta
from relpos_jax.positional.fire import Fire
from relpos_jax.positional.forgetting import Forgetting
from relpos_jax.positional.kerple import KerpleLog, KerplePower
from relpos_jax.positional.learned import Learned
from relpos_jax.positional.pope import Pope
from relpos_jax.positional.protocol import Block, Dims, Params, PositionEncoding, merge
from relpos_jax.positional.rerope import ReRope, SelfExtend
from relpos_jax.positional.rope import Rope
from relpos_jax.positional.rope_scaling import RopeScaling
from relpos_jax.positional.sandwich import Sandwich
from relpos_jax.positional.shaw import Shaw
from relpos_jax.positional.sinusoidal import Sinusoidal
from relpos_jax.positional.t5 import T5
from relpos_jax.positional.transformer_xl import TransformerXLRelative
from relpos_jax.positional.xpos import Xpos

__all__ = [
    "ENCODINGS",
    "Block",
    "Chain",
    "Dims",
    "Params",
    "PositionEncoding",
    "make",
    "make_layers",
    "merge",
]

# Every encoding by name. The conformance tests, the studies and the configs run over
# this table, so one line here is all that a new encoding needs.
ENCODINGS: dict[str, PositionEncoding] = {
    "none": PositionEncoding(),
    "sinusoidal": Sinusoidal(),
    "sinusoidal_interleaved": Sinusoidal(layout="interleaved"),
    "learned": Learned(),
    "rope": Rope(),
    "rope_interleaved": Rope(layout="interleaved"),
    "rope_partial": Rope(fraction=0.25),
    "p_rope": Rope(p=0.75),
    "rope_linear": Rope(scaling=RopeScaling("linear", 4.0)),
    "rope_ntk": Rope(scaling=RopeScaling("ntk", 4.0)),
    "rope_ntk_by_parts": Rope(scaling=RopeScaling("ntk_by_parts", 4.0, 2048)),
    "rope_dynamic_ntk": Rope(scaling=RopeScaling("dynamic_ntk", 2.0, 2048)),
    "rope_yarn": Rope(scaling=RopeScaling("yarn", 4.0, 2048)),
    "rope_longrope": Rope(scaling=RopeScaling("longrope", 4.0, 2048)),
    "rope_llama3": Rope(
        base=500000.0,
        scaling=RopeScaling(
            "llama3", 8.0, 8192, low_freq_factor=1.0, high_freq_factor=4.0
        ),
    ),
    "xpos": Xpos(),
    "rerope": ReRope(),
    "self_extend": SelfExtend(),
    "pope": Pope(),
    "alibi": Alibi(),
    "alibi_symmetric": Alibi(symmetric=True),
    "t5": T5(),
    "t5_bidirectional": T5(bidirectional=True),
    "shaw": Shaw(),
    "transformer_xl": TransformerXLRelative(),
    "deberta": Deberta(),
    "deberta_v2": Deberta(buckets=32, bias=True),
    "kerple_log": KerpleLog(),
    "kerple_power": KerplePower(),
    "fire": Fire(),
    "sandwich": Sandwich(),
    "continuous_bias": ContinuousBias(),
    "dape": Dape(),
    "cope": Cope(),
    "forgetting": Forgetting(),
    "data_dependent_alibi": Forgetting(gate_bias=5.0),
}


def nearest(word: str, known) -> str:
    """Returns a hint naming the known word nearest to a wrong one, or all of them."""
    close = difflib.get_close_matches(word, known, n=1, cutoff=0.5)
    if close:
        return f"did you mean {close[0]!r}?"
    return f"known: {', '.join(sorted(known))}"


def make(name: str, **knobs: Any) -> PositionEncoding:
    """Returns the encoding registered under `name`, with some fields changed.

    `make("chain", parts=[{"name": "rope"}, {"name": "alibi"}])` builds a `Chain`;
    `make("dape", inner={"name": "alibi"})` an encoding around another.

    Raises:
      ValueError: an unknown name or field, naming the nearest known one.
    """
    if name == "chain":
        unknown = set(knobs) - {"parts"}
        if unknown:
            raise ValueError(f"a chain has only 'parts', got {sorted(unknown)}")
        return Chain(tuple(make(**dict(part)) for part in knobs.get("parts", ())))
    if name not in ENCODINGS:
        hint = nearest(name, [*ENCODINGS, "chain"])
        raise ValueError(f"unknown position encoding {name!r}; {hint}")
    encoding = ENCODINGS[name]
    fields = [field.name for field in dataclasses.fields(encoding)]
    for knob in knobs:
        if knob not in fields:
            hint = nearest(knob, fields) if fields else "it has no fields"
            raise ValueError(f"{name!r} has no field {knob!r}; {hint}")
    knobs = {k: tuple(v) if isinstance(v, list) else v for k, v in knobs.items()}
    if hasattr(knobs.get("inner"), "keys"):
        knobs["inner"] = make(**dict(knobs["inner"]))
    return dataclasses.replace(encoding, **knobs)


def make_layers(
    spec: Mapping[str, Any],
) -> PositionEncoding | tuple[PositionEncoding, ...]:
    """Returns what `ModelConfig.position` takes: an encoding, or a pattern of them.

    `{"name": "rope", "base": 500000.0}` is one encoding for all layers;
    `{"pattern": [{"name": "rope"}, {"name": "none"}]}` repeats over the layers.

    Raises:
      ValueError: neither of the two, or an error of `make`.
    """
    if "pattern" not in spec:
        if "name" not in spec:
            raise ValueError(
                f"a position needs a 'name', or a 'pattern' of them, got {dict(spec)}"
            )
        return make(**dict(spec))
    if len(spec) > 1 or not spec["pattern"]:
        raise ValueError(
            f"'pattern' is a list of encodings and stands alone, got {dict(spec)}"
        )
    return tuple(make(**dict(part)) for part in spec["pattern"])

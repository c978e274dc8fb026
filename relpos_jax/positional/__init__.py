"""Position encodings, one file a paper or family, and their registry."""

import dataclasses
import difflib
from typing import Any

from relpos_jax.positional.alibi import Alibi
from relpos_jax.positional.chain import Chain
from relpos_jax.positional.learned import Learned
from relpos_jax.positional.protocol import Block, Dims, Params, PositionEncoding, merge
from relpos_jax.positional.rope import Rope
from relpos_jax.positional.shaw import Shaw
from relpos_jax.positional.sinusoidal import Sinusoidal
from relpos_jax.positional.t5 import T5
from relpos_jax.positional.transformer_xl import TransformerXLRelative

__all__ = [
    "ENCODINGS",
    "Block",
    "Chain",
    "Dims",
    "Params",
    "PositionEncoding",
    "make",
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
    "alibi": Alibi(),
    "alibi_symmetric": Alibi(symmetric=True),
    "t5": T5(),
    "t5_bidirectional": T5(bidirectional=True),
    "shaw": Shaw(),
    "transformer_xl": TransformerXLRelative(),
}


def nearest(word: str, known) -> str:
    """Returns a hint naming the known word nearest to a wrong one, or all of them."""
    close = difflib.get_close_matches(word, known, n=1, cutoff=0.5)
    if close:
        return f"did you mean {close[0]!r}?"
    return f"known: {', '.join(sorted(known))}"


def make(name: str, **knobs: Any) -> PositionEncoding:
    """Returns the encoding registered under `name`, with some fields changed.

    `make("chain", parts=[{"name": "rope"}, {"name": "alibi"}])` builds a `Chain`.

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
    return dataclasses.replace(encoding, **knobs)

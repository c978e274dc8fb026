"""Rotary embeddings as the configurations of released checkpoints describe them."""

from collections.abc import Mapping
from typing import Any

from relpos_jax.positional.rope import Rope
from relpos_jax.positional.rope_frequencies import yarn_attention_factor
from relpos_jax.positional.rope_scaling import RopeScaling, hint, scaling_of

# Each type of checkpoints: our kind, and their keys with our names for them.
_LENGTH = {"original_max_position_embeddings": "original_length"}
_YARN = (
    *("beta_fast", "beta_slow", "truncate", "attention_factor", "mscale"),
    *("mscale_all_dim", "extrapolation_factor", "attn_factor", "finetuned"),
)
_LLAMA3 = ("low_freq_factor", "high_freq_factor")
_LONGROPE = (
    *("short_factor", "long_factor", "attention_factor"),
    *("short_mscale", "long_mscale"),
)
TYPES: dict[str, tuple[str | None, dict[str, str]]] = {
    "default": (None, {}),
    "linear": ("linear", {"factor": "factor"}),
    "dynamic": ("dynamic_ntk", {"factor": "factor", **_LENGTH}),
    "yarn": ("yarn", {x: x for x in ("factor", *_YARN)} | _LENGTH),
    "longrope": ("longrope", {x: x for x in ("factor", *_LONGROPE)} | _LENGTH),
    "su": ("longrope", {x: x for x in ("factor", *_LONGROPE)} | _LENGTH),
    "llama3": ("llama3", {x: x for x in ("factor", *_LLAMA3)} | _LENGTH),
}


def scaling_from_dict(
    rope_scaling: Mapping[str, Any] | None,
    *,
    max_length: int | None = None,
    original_length: int | None = None,
) -> RopeScaling | None:
    """Returns what a checkpoint's `rope_scaling` dictionary means; None for no scaling.

    As in Hugging Face's code (4.57): "dynamic" counts `max_length` as the original
    length; a lone or zero `mscale` is ignored; LongRoPE's `factor` gives way to
    `max_length / original_length` where the configuration has the latter, and counts as
    1 where it is less (it only sets the attention factor). The released
    YaRN code's `attn_factor` multiplies the rule, and its `finetuned` changes nothing.
    Not as there: nothing unknown is skipped, and no number is guessed.

    Args:
      rope_scaling: its type under `rope_type` (or `type`, the old spelling).
      max_length: `max_position_embeddings` of the configuration around it.
      original_length: `original_max_position_embeddings` of that configuration.

    Raises:
      ValueError: an unknown type or key (naming the nearest known one), a missing one,
        keys that contradict one another, a value of the wrong type.
    """
    if rope_scaling is None:
        return None
    given = {key: value for key, value in rope_scaling.items() if value is not None}
    types = [given.pop(key) for key in ("rope_type", "type") if key in given]
    if not types:
        raise ValueError("rope_scaling has no 'rope_type' (old spelling: 'type')")
    if len(set(types)) > 1:
        raise ValueError(f"'rope_type' and 'type' contradict each other: {types}")
    if types[0] not in TYPES:
        raise ValueError(f"unknown rope_type {types[0]!r}; {hint(types[0], TYPES)}")
    kind, names = TYPES[types[0]]
    for key, value in given.items():
        if key not in names:
            known = hint(key, [*names, "rope_type"])
            raise ValueError(f"rope_type {types[0]!r} has no key {key!r}; {known}")
        _check_type(key, value)
    if kind is None:
        return None
    fields = {names[key]: value for key, value in given.items()}
    if "factor" not in fields and kind != "longrope":
        raise ValueError(f"rope_type {types[0]!r} needs 'factor'")
    inner = fields.get("original_length")
    if None not in (inner, original_length) and inner != original_length:
        raise ValueError(
            f"original_max_position_embeddings is {inner} in rope_scaling, but "
            f"{original_length} beside it"
        )
    original = inner or original_length
    if kind == "longrope":
        fields |= _longrope(fields, max_length, original)
    elif kind != "linear":
        fields["original_length"] = original or _needed(kind, max_length, types[0])
    if kind == "yarn":
        fields = _yarn(fields)
    return scaling_of({"kind": kind, **fields})


def rope_from_config(config: Mapping[str, Any]) -> Rope:
    """Returns the rotary embedding of a checkpoint's configuration.

    Reads `rope_theta`, `partial_rotary_factor`, `max_position_embeddings`,
    `original_max_position_embeddings` and `rope_scaling` (or `rope_parameters`, where
    newer ones keep the first two as well); halves, as Hugging Face stores weights.

    Raises:
      ValueError: as `scaling_from_dict`.
    """
    scaling = config.get("rope_parameters", config.get("rope_scaling"))
    scaling = None if scaling is None else dict(scaling)
    outer = dict(config)
    for key in ("rope_theta", "partial_rotary_factor"):
        if scaling is not None and key in scaling:
            outer[key] = scaling.pop(key)
    return Rope(
        base=float(outer.get("rope_theta", 10000.0)),
        fraction=float(outer.get("partial_rotary_factor") or 1.0),
        scaling=scaling_from_dict(
            scaling,
            max_length=outer.get("max_position_embeddings"),
            original_length=outer.get("original_max_position_embeddings"),
        ),
    )


def _needed(kind: str, max_length: int | None, name: str) -> int:
    # Llama 3's code has no fallback; the others take the configuration's length.
    if kind == "llama3" or max_length is None:
        raise ValueError(f"rope_type {name!r} needs 'original_max_position_embeddings'")
    return max_length


def _longrope(fields, max_length, original) -> dict[str, Any]:
    for key in ("short_factor", "long_factor"):
        if key not in fields:
            raise ValueError(f"rope_type 'longrope' needs {key!r}")
    scales = {fields.pop(x) for x in ("short_mscale", "long_mscale") if x in fields}
    changed: dict[str, Any] = {}
    if len(scales) > 1:
        raise ValueError("'short_mscale' and 'long_mscale' differ: not supported")
    if scales:
        changed["attention_factor"] = scales.pop()
    if original and max_length:
        changed["factor"] = max(max_length / original, 1.0)
    elif "factor" not in fields and not {**fields, **changed}.get("attention_factor"):
        raise ValueError(
            "rope_type 'longrope' needs 'factor', or 'max_position_embeddings' and "
            "'original_max_position_embeddings' beside it"
        )
    else:
        changed["factor"] = max(fields.get("factor", 1.0), 1.0)
    changed["original_length"] = original or _needed("longrope", max_length, "longrope")
    return changed


def _yarn(fields: dict[str, Any]) -> dict[str, Any]:
    fields.pop("finetuned", None)
    multiplier = fields.pop("attn_factor", None)
    if not (fields.get("mscale") and fields.get("mscale_all_dim")):
        fields = {k: v for k, v in fields.items() if "mscale" not in k}
    if multiplier is not None:
        if "attention_factor" in fields or "mscale" in fields:
            raise ValueError(
                "'attn_factor' contradicts 'attention_factor' and 'mscale'"
            )
        rule = yarn_attention_factor(float(fields["factor"]))
        fields["attention_factor"] = rule * multiplier
    return fields


def _check_type(key: str, value: Any) -> None:
    if key in ("truncate", "finetuned"):
        good = isinstance(value, bool)
    elif key in ("short_factor", "long_factor"):
        good = isinstance(value, (list, tuple)) and all(
            isinstance(x, (int, float)) for x in value
        )
    else:
        good = isinstance(value, (int, float)) and not isinstance(value, bool)
    if not good:
        raise ValueError(f"{key!r} has the wrong type: {value!r}")

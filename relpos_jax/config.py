"""From a ConfigDict to frozen dataclasses: the only place where the two meet.

A config file makes sections with `section` and `position`, so that every field of the
dataclass behind a section can be overridden from the command line; `build` turns them
back with `take`, which refuses what nobody would read.
"""

import dataclasses
import difflib
import json
import os
import pathlib
import types
import typing
from collections.abc import Callable, Mapping
from typing import Any, Literal, TypeVar, Union

import ml_collections
from ml_collections import config_dict

from relpos_jax import positional
from relpos_jax.attention.patterns import PATTERNS
from relpos_jax.data import Corpus, Vocabulary, load
from relpos_jax.data.tokens import known
from relpos_jax.masks import Mask
from relpos_jax.models.config import Hierarchy, ModelConfig
from relpos_jax.training.config import TrainingConfig
from relpos_jax.training.mesh import MeshConfig

T = TypeVar("T")
Section = ml_collections.ConfigDict | Mapping  # a ConfigDict is no Mapping


@dataclasses.dataclass(frozen=True)
class DataConfig:
    """What is read, and in which order.

    Attributes:
      source: `stdlib`, `file:PATH` or `tfds:NAME`; see `relpos_jax.data.load`.
      held_out_fraction: part of the text, from its end, kept for evaluation.
      max_bytes: reads no more of the text than this; None reads it all.
      order: "windows", shuffled, each for itself; "lanes", contiguous, for memory.
      masked_fraction: part of the tokens that an encoder has to predict: see
        `relpos_jax.data.masking`. A decoder predicts the next of every token.
      vocabulary: what a token is: "bytes", "characters", "words", "words:PATH", ...;
        see `relpos_jax.data.tokens.VOCABULARIES`.
      vocabulary_size: number of ids that the model is made for, which must be the
        vocabulary's; None takes the vocabulary's, for which "characters" and "words"
        need the text.
      documents: keeps documents apart: none attends to another.
      data_dir: where sets and their tokens are stored; None takes TFDS's own default.
    """

    source: str = "stdlib"
    held_out_fraction: float = 0.1
    max_bytes: int | None = None
    order: Literal["windows", "lanes"] = "windows"
    masked_fraction: float = 0.15
    vocabulary: str = "bytes"
    vocabulary_size: int | None = None
    documents: bool = False
    data_dir: str | None = None

    def load(self, vocabulary: Vocabulary | None = None) -> Corpus:
        """Returns the text; raises as `relpos_jax.data.load`.

        Args:
          vocabulary: instead of the one that is named here: a run's own.
        """
        return load(
            self.source,
            held_out_fraction=self.held_out_fraction,
            max_bytes=self.max_bytes,
            data_dir=self.data_dir,
            vocabulary=vocabulary or self.vocabulary,
        )

    @property
    def ids(self) -> int:
        """Number of ids; reads the text if only the text can tell."""
        if self.vocabulary_size is not None:
            return self.vocabulary_size
        return (known(self.vocabulary) or self.load().vocabulary).size


@dataclasses.dataclass(frozen=True)
class RunConfig:
    """One model trained once.

    Raises:
      ValueError: shuffled windows, or randomized positions, with memory; gradients
        through segments without memory, or with one that doesn't start empty.
    """

    data: DataConfig
    model: ModelConfig
    training: TrainingConfig
    mesh: MeshConfig = MeshConfig()

    def __post_init__(self):
        memory = self.model.memory_slots
        if memory and self.data.order != "lanes":
            raise ValueError(
                f"data.order={self.data.order!r} excludes memory "
                f"(model.memory_length={memory}): the memory would hold text that "
                "doesn't stand before the window. Set data.order='lanes', or "
                "model.memory_length=0."
            )
        if memory and self.training.sampler.whole:
            raise ValueError(
                f"training.positions={self.training.positions!r} draws the positions "
                "of a whole sequence at once, which excludes memory "
                f"(model.memory_length={memory}): segments of one text would not fit "
                "together. Set model.memory_length=0, or training.positions='offset'."
            )
        depth = self.training.gradient_depth
        if depth and self.model.compressive is not None:
            raise ValueError(
                f"training.gradient_depth={depth} excludes model.compressive: no "
                "gradient enters compressed memory, an auxiliary loss trains it. Set "
                "gradient_depth=0, or compressive=None."
            )
        if depth and not (memory and self.model.memory_start == "empty"):
            raise ValueError(
                f"training.gradient_depth={depth} needs a memory that starts empty, "
                f"got model.memory_length={memory} and model.memory_start="
                f"{self.model.memory_start!r}: without memory there is nothing that a "
                "gradient could go through, and before the first segments stand empty "
                "ones, which would push a memory of zeros out."
            )


def section(cls: type, **values: Any) -> ml_collections.ConfigDict:
    """Returns a config section with every field of a dataclass.

    The command line can override each of them, and set those that may be None to None
    or to a value. Fields with neither a value nor a default are left out, to be filled
    by `build`.

    Args:
      cls: the dataclass that `take` will make of the section.
      **values: what differs from the dataclass' defaults.

    Raises:
      ValueError: a value for a field that the dataclass doesn't have.
    """
    hints = typing.get_type_hints(cls)
    known = [field.name for field in dataclasses.fields(cls)]
    _refuse_unknown(values, known, cls.__name__)
    result = ml_collections.ConfigDict()
    for field in dataclasses.fields(cls):
        value = values.get(field.name, field.default)
        if value is dataclasses.MISSING:
            continue
        if type(None) in typing.get_args(hints[field.name]):
            # As `object`, the only type for which the command line takes None as well
            # as a value; `take` checks the value's type.
            value = config_dict.FieldReference(value, field_type=object)
        result[field.name] = value
    return result


def position(name: str, **knobs: Any) -> ml_collections.ConfigDict:
    """Returns the section of a position encoding: its name and its own knobs.

    Args:
      name: a name of `positional.ENCODINGS`; it can't be overridden later, since its
        knobs depend on it, so config files take it as their argument.
      **knobs: fields of the encoding that differ from the registered ones.

    Raises:
      ValueError: an unknown name or knob, naming the nearest known one.
    """
    encoding = positional.make(name, **knobs)
    fields = {f.name: getattr(encoding, f.name) for f in dataclasses.fields(encoding)}
    if name == "chain":
        fields = knobs
    else:
        fields = section(type(encoding), **fields)
    return ml_collections.ConfigDict({"name": name, "knobs": fields})


def pattern(name: str, **knobs: Any) -> ml_collections.ConfigDict:
    """Returns the section of a sparse pattern, for `model.pattern`.

    Args:
      name: a name of `attention.patterns.PATTERNS`; as that of an encoding, it can't be
        overridden later.
      **knobs: fields of the pattern.

    Raises:
      ValueError: an unknown name or knob, naming the nearest known one.
    """
    _refuse_unknown([name], list(PATTERNS), "model.pattern")
    fields = section(PATTERNS[name], **knobs)
    return ml_collections.ConfigDict({"name": name, "knobs": fields})


def hierarchy(
    segment: int, position: ml_collections.ConfigDict
) -> ml_collections.ConfigDict:
    """Returns the section of a second level of attention, for `model.hierarchy`.

    Args:
      segment: positions a segment.
      position: what `position` returned, for the encoding across segments.
    """
    return ml_collections.ConfigDict({"segment": segment, "position": position})


def take(config: Section, cls: type[T], path: str, **given: Any) -> T:
    """Returns the dataclass that a config section describes.

    Integers are taken for floats and lists for tuples; nothing else is converted.

    Args:
      config: the section, a ConfigDict or any mapping.
      cls: a dataclass; its annotations say which types are right.
      path: the section's place in the config, for messages ("training").
      **given: fields that the caller knows and a section may not set.

    Raises:
      ValueError: a key that the dataclass doesn't have (naming the nearest it has), a
        field without value or default, or a value that the dataclass refuses.
      TypeError: a value of the wrong type.
    """
    config = _plain(config)
    hints = typing.get_type_hints(cls)
    fields = [f for f in dataclasses.fields(cls) if f.init and f.name not in given]
    _refuse_unknown(config, [field.name for field in fields], path)
    values = dict(given)
    for field in fields:
        place = f"{path}.{field.name}"
        if field.name in config:
            values[field.name] = _coerce(config[field.name], hints[field.name], place)
        elif (
            field.default is dataclasses.MISSING
            and field.default_factory is dataclasses.MISSING
        ):
            raise ValueError(f"config.{place} has no value and no default: set it")
    return cls(**values)


def build(config: Section, *, others: tuple[str, ...] = ()) -> RunConfig:
    """Returns the run that a config describes.

    Args:
      config: sections `data`, `model`, `training` and `mesh`; `model.position` has a
        `name` and `knobs`. A section left out is all defaults.
      others: names of further sections that the caller takes for itself.

    Raises:
      ValueError: a key that nobody reads, naming the nearest known one; a value or a
        combination of values that makes no sense.
      TypeError: a value of the wrong type.
    """
    config = _plain(config)
    _refuse_unknown(config, ["data", "model", "training", "mesh", *others], "")
    training = take(config.get("training", {}), TrainingConfig, "training")
    data = take(config.get("data", {}), DataConfig, "data")
    mesh = take(config.get("mesh", {}), MeshConfig, "mesh")
    model = _plain(config.get("model", {}))
    given = {
        # An encoder has one more id, which stands for hidden tokens.
        "vocabulary": data.ids + bool(model.get("bidirectional")),
        "position": _position(model.pop("position", {"name": "rope"})),
        "pattern": take_pattern(model.pop("pattern", None)),
        "hierarchy": take_hierarchy(model.pop("hierarchy", None), _position),
    }
    model = take(model, ModelConfig, "model", **given)
    return RunConfig(data, model, training, mesh)


def resolved(run: Any) -> Any:
    """Returns a config dataclass as JSON values; an encoding's class is its `name`."""
    if dataclasses.is_dataclass(run) and not isinstance(run, type):
        names = [field.name for field in dataclasses.fields(run)]
        values = {name: resolved(getattr(run, name)) for name in names}
        if isinstance(run, positional.PositionEncoding):
            return {"name": type(run).__name__, **values}
        if isinstance(run, Mask):
            names = [name for name, cls in PATTERNS.items() if cls is type(run)]
            return {"name": names[0], "knobs": values}
        return values
    if isinstance(run, (list, tuple)):
        return [resolved(item) for item in run]
    if run is None or isinstance(run, (bool, int, float, str)):
        return run
    return getattr(run, "__name__", None) or str(run)


def write_resolved(run: RunConfig, workdir: str | os.PathLike, **more: Any) -> None:
    """Writes the run, all defaults filled in, to `workdir/config.json`.

    Args:
      run: the run.
      workdir: an existing folder.
      **more: further top-level entries, JSON values (the corpus, versions).
    """
    target = pathlib.Path(workdir) / "config.json"
    draft = target.with_suffix(".json.tmp")
    draft.write_text(json.dumps(resolved(run) | more, indent=2) + "\n")
    os.replace(draft, target)


def differences(old: Any, new: Any, path: str = "") -> list[str]:
    """Returns a line `path: old value there, new value here` for each key that differs.

    Args:
      old: JSON values, as `config.json` holds them.
      new: JSON values to compare with.
      path: where in the config the two stand.
    """
    if isinstance(old, Mapping) and isinstance(new, Mapping):
        lines = []
        for key in [*old, *(key for key in new if key not in old)]:
            place = f"{path}.{key}" if path else key
            lines += differences(old.get(key), new.get(key), place)
        return lines
    return [] if old == new else [f"{path}: {old!r} there, {new!r} here"]


def _plain(config: Section) -> dict[str, Any]:
    """Returns a section as nested dicts, references resolved."""
    if isinstance(config, ml_collections.ConfigDict):
        return config.to_dict()
    return dict(config)


def _position(
    config: Section,
) -> positional.PositionEncoding | tuple[positional.PositionEncoding, ...]:
    config = _plain(config)
    if "pattern" in config:  # a mixture: the layers take the parts in turn
        _refuse_unknown(config, ["pattern"], "model.position")
        return tuple(_position(part) for part in config["pattern"])
    _refuse_unknown(config, ["name", "knobs"], "model.position")
    if "name" not in config:
        raise ValueError("config.model.position has no name: set it")
    name, knobs = config["name"], _plain(config.get("knobs") or {})
    if name in positional.ENCODINGS:
        hints = typing.get_type_hints(type(positional.ENCODINGS[name]))
        for key in set(knobs) & set(hints):
            place = f"model.position.knobs.{key}"
            knobs[key] = _coerce(knobs[key], hints[key], place)
    return positional.make(name, **knobs)


def take_pattern(config: Section | list | None) -> Mask | tuple[Mask, ...] | None:
    """Returns the mask that `pattern`'s section describes, or a tuple of a list."""
    if config is None:
        return None
    if isinstance(config, (list, tuple)):
        return tuple(take_pattern(part) for part in config)
    config = _plain(config)
    _refuse_unknown(config, ["name", "knobs"], "model.pattern")
    name = config.get("name")
    _refuse_unknown([name], list(PATTERNS), "model.pattern.name")
    knobs = config.get("knobs") or {}
    return take(knobs, PATTERNS[name], "model.pattern.knobs")


def take_hierarchy(config: Section | None, read: Callable) -> Hierarchy | None:
    """Returns what `hierarchy`'s section describes; `read` turns its `position`."""
    if config is None:
        return None
    values = _plain(config)
    if "position" not in values:
        raise ValueError("config.model.hierarchy.position has no value: set it")
    encoding = read(values.pop("position"))
    return take(values, Hierarchy, "model.hierarchy", position=encoding)


def _refuse_unknown(keys, known: list[str], path: str) -> None:
    for key in keys:
        if key in known:
            continue
        place = f"config.{path}.{key}" if path else f"config.{key}"
        close = difflib.get_close_matches(str(key), known, n=1, cutoff=0.5)
        hint = f"did you mean {close[0]!r}?" if close else f"known: {', '.join(known)}"
        raise ValueError(f"{place}: nobody reads {key!r}; {hint}")


def _coerce(value: Any, hint: Any, place: str) -> Any:
    """Returns `value` as the annotation wants it; TypeError names `place`."""
    origin, parts = typing.get_origin(hint), typing.get_args(hint)
    if origin in (Union, types.UnionType):
        if value is None and type(None) in parts:
            return None
        kinds = [part for part in parts if part is not type(None)]
        for kind in kinds[:-1]:
            try:
                return _coerce(value, kind, place)
            except TypeError:
                pass  # the next kind may take it
        return _coerce(value, kinds[-1], place)
    if origin is Literal:
        if value in parts:
            return value
        close = difflib.get_close_matches(str(value), map(str, parts), n=1, cutoff=0.5)
        hint = f"; did you mean {close[0]!r}?" if close else ""
        raise ValueError(f"config.{place} must be one of {parts}, got {value!r}{hint}")
    if origin is tuple and isinstance(value, (list, tuple)):
        if len(parts) == 2 and parts[1] is Ellipsis:
            parts = parts[:1] * len(value)
        if len(parts) == len(value):
            return tuple(
                _coerce(item, part, f"{place}[{i}]")
                for i, (item, part) in enumerate(zip(value, parts, strict=True))
            )
    if dataclasses.is_dataclass(hint) and isinstance(value, Mapping):
        return take(value, hint, place)
    is_flag = isinstance(value, bool)
    if hint is float and isinstance(value, (int, float)) and not is_flag:
        return float(value)
    if hint in (int, bool, str):
        if isinstance(value, hint) and (hint is bool or not is_flag):
            return value
    elif origin is None and hint is not float:
        return value  # a type of its own: its dataclass checks it
    name = getattr(hint, "__name__", str(hint)) if origin is None else str(hint)
    raise TypeError(
        f"config.{place} must be {name}, got {value!r} of type {type(value).__name__}"
    )

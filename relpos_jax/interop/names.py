"""Weights of Transformer-XL by the names of its PyTorch code, and ours.

The authors' `MemTransformerLM` and Hugging Face's port name their weights alike, so one
list of entries serves both, in both directions and under `jax.grad`.
"""

import pathlib
import pickle
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from relpos_jax.models import ModelConfig, TransformerXL
from relpos_jax.positional.transformer_xl import TransformerXLRelative

Path = tuple[str | int, ...]
Arrays = Mapping[str, Any]
# Buffers that follow from the configuration: checked where present.
FREQUENCIES = "pos_emb.inv_freq"
FLOATS = ("float32", "float16", "bfloat16")


class WrongWeights(ValueError):
    """Weights that are not those of the configuration; the message lists all faults."""


class Entry(NamedTuple):
    """One array of theirs and the parameters of ours that it holds.

    Attributes:
      name: theirs.
      shape: of theirs.
      paths: of ours.
      split: turns theirs into ours, in the order of `paths`.
      join: turns ours into theirs.
      aliases: further names of the same array, for tied weights.
    """

    name: str
    shape: tuple[int, ...]
    paths: tuple[Path, ...]
    split: Callable[[Any], tuple]
    join: Callable[..., Any]
    aliases: tuple[str, ...] = ()


def entries(
    config: ModelConfig, *, body: str = "", head_order: str = "official"
) -> list[Entry]:
    """Returns every array of a model's state dictionary.

    Args:
      config: ours.
      body: prefix of all names but the softmax's ("transformer." at Hugging Face).
      head_order: in which their head has the clusters, see `AdaptiveConfig`.

    Raises:
      ValueError: a model that their code does not have; lists why.
    """
    refuse(config)
    found = [*_softmax(config, body, head_order)]
    shared = tuple(f"{body}layers.{i}.dec_attn." for i in range(config.layers))
    shared = shared if body else ()  # only Hugging Face repeats them in each layer
    if not config.positions[0].untie:
        found += _biases(config, body, ("position",), shared)
    for i in range(config.layers):
        found += _layer(config, f"{body}layers.{i}", ("layers", i))
    return found


def refuse(config: ModelConfig) -> None:
    """Raises ValueError if the released code has no such model, with all reasons."""
    xl = config.position
    reasons = []
    if not isinstance(xl, TransformerXLRelative) or xl.base != 10000.0:
        reasons.append(f"its position is TransformerXLRelative(), not {xl}")
    if config.activation != "relu":
        reasons.append(f"its activation is 'relu', not {config.activation!r}")
    if config.norm_kind != "layer" or config.embedding_norm:
        reasons.append("it has layer norms, in its layers only")
    if config.attention_bias or not config.feedforward_bias:
        reasons.append("its feed-forward layers have biases, its attention has none")
    if config.bidirectional:
        reasons.append("it is a decoder: bidirectional=False")
    if config.has_final_norm:
        reasons.append("it has no norm behind the last layer: final_norm=False")
    if not config.output_bias:
        reasons.append("its softmax has biases: output_bias=True")
    if config.pattern is not None:
        reasons.append(f"it has no sparse pattern, and pattern is {config.pattern}")
    if config.hierarchy is not None:
        reasons.append(f"it has no second level, and hierarchy is {config.hierarchy}")
    if config.width % 2:
        reasons.append(f"its width is even, not {config.width}")
    if reasons:
        raise ValueError(
            "the released Transformer-XL code has no such model:\n  "
            + "\n  ".join(reasons)
        )


def to_tree(weights: Arrays, listed: Sequence[Entry]) -> dict:
    """Returns their weights as a nested dict of our parameters, differentiably.

    An array whose own name is absent is taken from one of its aliases.
    """
    tree: dict = {}
    for entry in listed:
        name = next(n for n in (entry.name, *entry.aliases) if n in weights)
        parts = entry.split(weights[name])
        for path, part in zip(entry.paths, parts, strict=True):
            node = tree
            for step in path[:-1]:
                node = node.setdefault(step, {})
            node[path[-1]] = part
    return tree


def from_tree(tree: Mapping, listed: Sequence[Entry]) -> dict[str, np.ndarray]:
    """Returns our parameters as their weights, each array under its own name only."""

    def at(path):
        node = tree
        for step in path:
            node = node[step]
        return np.asarray(node)

    joined = ((e.name, e.join(*(at(path) for path in e.paths))) for e in listed)
    return {name: np.ascontiguousarray(array) for name, array in joined}


def with_aliases(weights: Arrays, listed: Sequence[Entry]) -> dict[str, Any]:
    """Returns the weights with every tied array under all of its names."""
    more = {alias: weights[e.name] for e in listed for alias in e.aliases}
    return {**weights, **more}


def check(weights: Arrays, listed: Sequence[Entry], optional: Arrays, place) -> None:
    """Raises WrongWeights, listing all faults, unless the weights are these entries'.

    Args:
      weights: theirs, by name.
      listed: what there should be.
      optional: what there may be beside it, with the values it should have.
      place: where the weights are from, for the message.
    """
    faults, known = [], set(optional)
    for entry in listed:
        names = (entry.name, *entry.aliases)
        known.update(names)
        there = [name for name in names if name in weights]
        if not there:
            also = f" (or {', '.join(entry.aliases)})" if entry.aliases else ""
            faults.append(f"missing: {entry.name} {entry.shape}{also}")
        for name in there:
            array, first = weights[name], weights[there[0]]
            if tuple(array.shape) != entry.shape:
                shape = tuple(array.shape)
                faults.append(f"shape: {name} is {shape}, should be {entry.shape}")
            elif str(array.dtype) not in FLOATS:
                faults.append(f"dtype: {name} is {array.dtype}, should be float32")
            elif not np.array_equal(array, first, equal_nan=True):
                faults.append(f"not tied: {name} differs from {there[0]}")
    for name, value in optional.items():
        if name not in weights:
            continue
        array = np.asarray(weights[name])
        if array.shape != value.shape or not np.allclose(array, value, rtol=1e-5):
            faults.append(f"value: {name} is not what the configuration implies")
    faults += [f"unknown: {name}" for name in sorted(set(weights) - known)]
    if faults:
        raise WrongWeights(
            f"{place} does not hold the weights of this configuration:\n  "
            + "\n  ".join(faults)
        )


def frequencies(width: int) -> np.ndarray:
    """Returns the sinusoid's frequencies `[width / 2]`, as their code keeps them."""
    exponent = np.arange(0, width, 2, dtype=np.float32) / np.float32(width)
    # The power rounded once from float64 is bit for bit what PyTorch's CPU code gives.
    power = (10000.0 ** exponent.astype(np.float64)).astype(np.float32)
    return np.float32(1) / power


def to_params(weights: Arrays, listed: Sequence[Entry], config: ModelConfig) -> Any:
    """Returns `(graphdef, params)` of the model; weights are turned into float32."""
    abstract = nnx.eval_shape(lambda: TransformerXL(config, key=jax.random.key(0)))
    graphdef, state = nnx.split(abstract)
    tree = to_tree(weights, listed)
    tree = jax.tree.map(lambda x: jnp.asarray(x).astype(jnp.float32), tree)
    nnx.replace_by_pure_dict(state, tree)
    return graphdef, nnx.as_pure(state)


def read(path: str | pathlib.Path) -> dict[str, np.ndarray]:
    """Returns the arrays of a `.safetensors` file or a PyTorch state dictionary.

    Executes no pickled code: a PyTorch file is read with `weights_only=True`.

    Raises:
      FileNotFoundError: no such file.
      ImportError: the library that reads it is not installed; says which.
      ValueError: a file that holds anything but arrays by name.
    """
    path = pathlib.Path(path)
    if not path.is_file():
        raise FileNotFoundError(f"no file of weights {path}")
    if path.suffix == ".safetensors":
        return _safetensors().load_file(path)
    try:
        import torch
    except ImportError as error:
        raise ImportError(
            f"{path.name} is a PyTorch file, and torch is not installed: install it, "
            "or convert the file to .safetensors where torch is "
            "(safetensors.torch.save_file) and give that"
        ) from error
    wrong = (
        f"{path} is no state dictionary (tensors by name): save model.state_dict(), "
        "not the model or its trainer's state"
    )
    try:
        state = torch.load(path, map_location="cpu", weights_only=True)
    except pickle.UnpicklingError as error:
        raise ValueError(wrong) from error
    if not isinstance(state, Mapping) or not all(map(torch.is_tensor, state.values())):
        raise ValueError(wrong)
    # NumPy has no bfloat16 of torch's; float32 holds all three kinds exactly.
    half = (torch.float16, torch.bfloat16)
    return {k: (v.float() if v.dtype in half else v).numpy() for k, v in state.items()}


def write(path: str | pathlib.Path, weights: Arrays) -> None:
    """Writes arrays as a `.safetensors` file, marked as PyTorch's readers expect."""
    _safetensors().save_file(dict(weights), path, metadata={"format": "pt"})


def _safetensors():
    try:
        import safetensors.numpy
    except ImportError as error:
        raise ImportError(
            "reading and writing .safetensors needs the package safetensors: "
            "pip install safetensors"
        ) from error
    return safetensors.numpy


def _same(name: str, shape, path: Path, aliases=()) -> Entry:
    return Entry(name, tuple(shape), (path,), lambda x: (x,), lambda x: x, aliases)


def _turned(name: str, shape, path: Path, ours: tuple[int, ...]) -> Entry:
    """A linear map's weight `[out in]`, for us `[in out]` with some axes split."""
    return Entry(
        name,
        tuple(shape),
        (path,),
        lambda x: (x.T.reshape(ours),),
        lambda x: x.reshape(shape[::-1]).T,
    )


def _biases(config, prefix: str, path: Path, repeated=()) -> Iterator[Entry]:
    shape = config.heads, config.head_dim
    for theirs, ours in (("r_w_bias", "content_bias"), ("r_r_bias", "position_bias")):
        aliases = tuple(f"{layer}{theirs}" for layer in repeated)
        yield _same(f"{prefix}{theirs}", shape, (*path, ours), aliases)


def _layer(config: ModelConfig, name: str, path: Path) -> Iterator[Entry]:
    width, inner = config.width, config.feedforward
    heads, head_dim = config.heads, config.head_dim
    features, ours = heads * head_dim, (*path, "attention")
    theirs = f"{name}.dec_attn"
    if config.positions[0].untie:
        yield from _biases(config, f"{theirs}.", (*ours, "position"))

    def split(x):  # rows: all queries, all keys, all values
        x = x.T.reshape(width, 3, heads, head_dim)
        return x[:, 0], x[:, 1], x[:, 2]

    def join(*parts):
        return np.stack(parts, 1).reshape(width, 3 * features).T

    paths = tuple((*ours, part, "kernel") for part in ("query", "key", "value"))
    fused = f"{theirs}.qkv_net.weight"
    yield Entry(fused, (3 * features, width), paths, split, join)
    split_heads = (width, heads, head_dim)
    position = (*ours, "position", "projection")
    yield _turned(f"{theirs}.r_net.weight", (features, width), position, split_heads)
    joined, output = (heads, head_dim, width), (*ours, "output", "kernel")
    yield _turned(f"{theirs}.o_net.weight", (width, features), output, joined)
    for number, part, shape in ((0, "inner", (inner, width)), (3, "outer", None)):
        shape = shape or (width, inner)
        theirs = f"{name}.pos_ff.CoreNet.{number}"
        place = (*path, "feedforward", part)
        yield _turned(f"{theirs}.weight", shape, (*place, "kernel"), shape[::-1])
        yield _same(f"{theirs}.bias", shape[:1], (*place, "bias"))
    for part, place in (("dec_attn", "attention"), ("pos_ff", "feedforward")):
        theirs, place = f"{name}.{part}.layer_norm", (*path, f"{place}_norm")
        yield _same(f"{theirs}.weight", (width,), (*place, "scale"))
        yield _same(f"{theirs}.bias", (width,), (*place, "bias"))


def _softmax(config: ModelConfig, body: str, head_order: str) -> Iterator[Entry]:
    """The entries of the embedding and the softmax, adaptive or not."""
    adaptive, width = config.adaptive, config.width
    tied = config.tie_embeddings
    shapes = ((config.vocabulary, width),)
    if adaptive is not None:
        shapes = adaptive.tables(config.vocabulary, width)
    for i, shape in enumerate(shapes):
        theirs, out = f"{body}word_emb.emb_layers.{i}.weight", f"crit.out_layers.{i}"
        place, own, bias = ("embedding",), ("output",), ("output_bias",)
        if adaptive is not None:
            place, own = ("embedding", "table", str(i)), ("softmax", "table", str(i))
            bias = ("softmax", "bias", str(i))
        yield _same(theirs, shape, place, (f"{out}.weight",) if tied else ())
        if not tied:
            yield _same(f"{out}.weight", shape, own)
        yield _same(f"{out}.bias", shape[:1], bias)
    if adaptive is None:
        return
    widths, own = adaptive.widths(width), adaptive.own_projections(width)
    if adaptive.projected(width):
        for i in range(len(shapes)):
            users = range(len(widths)) if adaptive.div_val == 1 else (i,)
            aliases = tuple(f"crit.out_projs.{j}" for j in users if j not in own)
            theirs, place = f"{body}word_emb.emb_projs.{i}", ("embedding", "projection")
            yield _same(theirs, (width, widths[i]), (*place, str(i)), aliases)
    for i in own:
        place = ("softmax", "projection", str(i))
        yield _same(f"crit.out_projs.{i}", (width, widths[i]), place)
    tails = len(adaptive.cutoffs)
    if not tails:
        return
    step = 1 if adaptive.head_order == head_order else -1
    for theirs, ours, shape in (
        ("crit.cluster_weight", "cluster", (tails, widths[0])),
        ("crit.cluster_bias", "cluster_bias", (tails,)),
    ):
        path = (("softmax", ours),)
        yield Entry(
            theirs, shape, path, lambda x: (x[::step],), lambda x: x[::step], ()
        )

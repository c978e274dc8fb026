"""Encoding surgery: a trained model with another position encoding, or another scaling.

    swapped = surgery.transplant(config, params, make("alibi"), jax.random.key(0))
    swapped.config, swapped.params, swapped.new, swapped.dropped

What the two models have in common is kept bit for bit. RoPE's scalings, ALiBi and NoPE
have no parameters, so changing them changes the configuration alone (Chen et al. 2023
for position interpolation; Press et al. 2022 for ALiBi).
"""

import dataclasses
import re
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from flax import nnx
from jaxtyping import PyTree

from relpos_jax import data
from relpos_jax.config import RunConfig
from relpos_jax.models import ModelConfig, TransformerXL
from relpos_jax.models.basics import as_arrays
from relpos_jax.positional import Dims, PositionEncoding, merge
from relpos_jax.positional.tabulated import TABLE, Tabulated
from relpos_jax.training.loop import make_batches, step_keys
from relpos_jax.training.optimiser import path_name
from relpos_jax.training.state import initial
from relpos_jax.training.step import make_train_call

_OWN = re.compile(r"layers/(\d+)/attention/position/")
_SHARED = "position/"


class Transplant(NamedTuple):
    """A model with its new encoding.

    Attributes:
      config: the model's configuration, with the new encoding.
      graphdef: the model without its parameters; `nnx.merge(graphdef, params)` is it.
      params: its parameters.
      kept: names of the parameters taken over as they were.
      new: names of those that start from their initial values.
      dropped: names of those of the old model that have no place in the new one.
    """

    config: ModelConfig
    graphdef: nnx.GraphDef
    params: PyTree
    kept: tuple[str, ...]
    new: tuple[str, ...]
    dropped: tuple[str, ...]


def skeleton(config: ModelConfig) -> tuple[nnx.GraphDef, PyTree]:
    """Returns a model's graph and the shapes of its parameters, allocating nothing."""
    model = nnx.eval_shape(lambda: TransformerXL(config, key=jax.random.key(0)))
    graphdef, shapes = nnx.split(model)
    return graphdef, nnx.as_pure(shapes)


def by_name(params: PyTree) -> dict[str, Any]:
    """Returns the parameters under their names, `layers/0/attention/key/kernel`."""
    leaves = jax.tree_util.tree_leaves_with_path(nnx.as_pure(params))
    return {path_name(path): leaf for path, leaf in leaves}


def transplant(
    config: ModelConfig,
    params: PyTree,
    position: PositionEncoding | tuple[PositionEncoding, ...],
    key: jax.Array,
) -> Transplant:
    """Returns the model with another encoding, everything else kept bit for bit.

    An encoding's parameters are taken over where a layer's old and new encoding are of
    the same class and name and shape agree (a rescaled RoPE, a clamp); otherwise the
    new ones start from the values that `key` and their names give.

    Args:
      config: of the trained model.
      params: its parameters, as `nnx.split` or a checkpoint gave them.
      position: the new encoding, or a pattern of them over the layers.
      key: for parameters that the old model does not have.

    Raises:
      ValueError: an absolute encoding for a model with memory; parameters that are not
        those of `config` (names the first that differ).
    """
    old = by_name(params)
    _check(config, old)
    target = dataclasses.replace(config, position=position)
    model = TransformerXL(target, key=key)
    graphdef, fresh = nnx.split(model)
    fresh = nnx.as_pure(fresh)
    kept, new = [], []

    def choose(path, leaf):
        name = path_name(path)
        same = name in old and old[name].shape == leaf.shape
        if same and _comparable(name, config, target):
            kept.append(name)
            return old[name]
        new.append(name)
        return leaf

    params = jax.tree_util.tree_map_with_path(choose, fresh)
    dropped = tuple(name for name in old if name not in kept)
    return Transplant(target, graphdef, params, tuple(kept), tuple(new), dropped)


def adapt(
    transplant: Transplant, run: RunConfig, corpus: data.Corpus
) -> tuple[Transplant, list[float]]:
    """Trains a model with its new encoding for a few steps, all parameters alike.

    With a fresh optimiser, whose learning rate warms up and falls as `run.training`
    says; in memory, without checkpoints.

    Args:
      transplant: the model; its parameters stay as they are.
      run: data and training; `run.training.steps` says how many steps.
      corpus: the text.

    Returns:
      The trained model, and each step's loss in nats a token.
    """
    training = run.training
    model = nnx.merge(transplant.graphdef, transplant.params)
    params = jax.tree.map(jnp.copy, nnx.as_pure(transplant.params))
    memory = model.init_memory(training.batch)
    state = initial(params, training, memory)
    call = make_train_call(transplant.graphdef, training)
    key, positions = step_keys(transplant.config, training)
    batches, losses = make_batches(run, corpus), []
    for step in range(0, training.steps, training.steps_per_call):
        count = min(training.steps_per_call, training.steps - step)
        stack = batches.stack(step, training.steps_per_call)
        state, report = call(state, stack, count, key, positions)
        loss = report.loss[:count] / jnp.maximum(report.count[:count], 1)
        losses += loss.tolist()
    return transplant._replace(params=state.evaluated), losses


def tabulate(
    config: ModelConfig, params: PyTree, reach: int
) -> tuple[ModelConfig, PyTree]:
    """Returns the model with its encodings' tables evaluated once, for decoding.

    Args:
      config: of the model.
      params: its parameters.
      reach: distances to evaluate; see `Tabulated`.
    """
    pattern = config.position
    pattern = pattern if isinstance(pattern, tuple) else (pattern,)
    dims = config.dims
    wrapped = tuple(Tabulated.wrap(encoding, reach, dims) for encoding in pattern)
    target = dataclasses.replace(config, position=wrapped)
    graphdef, _ = skeleton(config)
    leaves = by_name(params)
    leaves |= jax.jit(_tables, static_argnums=(0, 1, 2))(
        graphdef, target.positions, dims, nnx.as_pure(params)
    )
    _, shapes = skeleton(target)
    return target, jax.tree_util.tree_map_with_path(
        lambda path, _: leaves[path_name(path)], shapes
    )


def _tables(graphdef, encodings, dims: Dims, params) -> dict[str, Any]:
    """Returns the tables of all layers, under the names they have in the new model."""
    model = nnx.merge(graphdef, params)
    config, shared = model.config, as_arrays(model.position)
    found = {}
    for i, (layer, encoding) in enumerate(zip(model.layers, encodings, strict=True)):
        if not isinstance(encoding, Tabulated):
            continue
        common = config.shared_part(shared, config.positions[i])
        own = merge(as_arrays(layer.attention.position), common)
        table = encoding.fill(own, dims.heads, dims.head_dim)
        place = f"layers/{i}/attention/position/{TABLE}"
        found |= {f"{place}/{name}": leaf for name, leaf in table.items()}
    return found


def _comparable(name: str, old: ModelConfig, new: ModelConfig) -> bool:
    """Returns whether equal names mean the same thing in the two models."""
    own = _OWN.match(name)
    if own:
        layer = int(own.group(1))
        return type(old.positions[layer]) is type(new.positions[layer])
    if name.startswith(_SHARED):
        kinds = [[type(e) for e in config.encodings] for config in (old, new)]
        return kinds[0] == kinds[1]
    return True


def _check(config: ModelConfig, found: dict[str, Any]) -> None:
    shapes = by_name(skeleton(config)[1])
    wrong = [name for name in shapes if name not in found]
    wrong += [name for name in found if name not in shapes]
    wrong += [n for n in shapes if n in found and shapes[n].shape != found[n].shape]
    if wrong:
        raise ValueError(
            f"{len(wrong)} parameters are not those of the configuration, such as "
            f"{', '.join(wrong[:3])}: pass the configuration they were trained with"
        )

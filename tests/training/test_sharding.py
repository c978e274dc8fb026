"""Which axis of what is cut over which axis of the mesh; nothing is compiled."""

import dataclasses
import math

import jax
import jax.numpy as jnp
import optax
import pytest
from flax import nnx

from relpos_jax import positional
from relpos_jax.memory import KeyValueCache, SegmentMemory
from relpos_jax.models import (
    AdaptiveConfig,
    EncoderDecoder,
    EncoderDecoderConfig,
    ModelConfig,
    TransformerXL,
)
from relpos_jax.training import sharding
from relpos_jax.training.mesh import AXES, MeshConfig
from relpos_jax.training.optimiser import path_name
from relpos_jax.training.sharding import PARAMETERS, UnevenSharding
from tests.attention.test_ring import run

MESH = MeshConfig(data=2, fsdp=2, tensor=2).abstract(8)


def shapes_of(**changes):
    config = ModelConfig(
        vocabulary=64,
        layers=1,
        width=16,
        heads=4,
        head_dim=8,
        feedforward=32,
        position=positional.make("transformer_xl"),
    )
    config = dataclasses.replace(config, **changes)
    model = nnx.eval_shape(lambda: TransformerXL(config, key=jax.random.key(0)))
    return nnx.as_pure(nnx.state(model))


def specs_of(tree, mesh=MESH, rules=PARAMETERS):
    found = sharding.shardings(tree, mesh, rules)
    leaves = jax.tree_util.tree_leaves_with_path(found)
    return {path_name(path): leaf.spec for path, leaf in leaves}


def test_parameters_are_cut_by_name():
    specs = specs_of(shapes_of())
    fsdp, tensor = ("fsdp",), ("tensor",)
    assert specs["embedding"] == jax.P(tensor, fsdp)
    layer = "layers/0/"
    assert specs[layer + "attention/query/kernel"] == jax.P(fsdp, tensor, None)
    assert specs[layer + "attention/output/kernel"] == jax.P(tensor, None, fsdp)
    assert specs[layer + "attention/position/projection"] == jax.P(fsdp, tensor, None)
    assert specs[layer + "feedforward/outer/kernel"] == jax.P(tensor, fsdp)
    assert specs[layer + "attention_norm/scale"] == jax.P()


@pytest.mark.parametrize("name", positional.ENCODINGS)
def test_every_encoding_s_parameters_have_a_rule(name):
    specs_of(shapes_of(position=positional.make(name)))


def test_chains_mixtures_and_wrappers_too():
    rope, t5 = positional.make("rope"), positional.make("t5")
    chain = positional.make("chain", parts=[{"name": "deberta"}, {"name": "rope"}])
    dape = positional.make("dape", inner={"name": "transformer_xl"})
    for position in ((rope, t5, chain), dape):
        specs_of(shapes_of(position=position, layers=3))


def test_encoder_decoders_have_rules_for_both_halves():
    decoder = ModelConfig(
        vocabulary=64,
        layers=1,
        width=16,
        heads=4,
        head_dim=8,
        feedforward=32,
        position=positional.make("t5"),
        activation="geglu",
        attention_bias=True,
        embedding_norm=True,
        tie_embeddings=False,
    )
    cross = positional.make("t5_bidirectional")
    config = EncoderDecoderConfig.of(decoder, cross=cross)
    model = nnx.eval_shape(lambda: EncoderDecoder(config, key=jax.random.key(0)))
    specs = specs_of(nnx.as_pure(nnx.state(model)))
    layer = "decoder/layers/0/cross_attention"
    assert specs[f"{layer}/key/kernel"] == jax.P(("fsdp",), ("tensor",), None)
    assert specs["encoder/layers/0/feedforward/gate/kernel"] == (
        jax.P(("fsdp",), ("tensor",))
    )
    assert specs["cross_position/table"] == jax.P()


def test_adaptive_tables_are_cut_even_where_the_vocabulary_is_odd():
    adaptive = AdaptiveConfig(cutoffs=(20, 40), div_val=2)
    specs = specs_of(shapes_of(vocabulary=63, adaptive=adaptive, output_bias=True))
    assert specs["embedding/table/0"] == jax.P(("tensor",), ("fsdp",))
    assert specs["embedding/table/2"] == jax.P(None, ("fsdp", "tensor"))  # 23 ids
    assert specs["softmax/bias/2"] == jax.P(None)


def test_what_has_no_rule_is_named():
    with pytest.raises(KeyError, match="layers/0/novel/kernel"):
        specs_of({"layers": {"0": {"novel": {"kernel": jnp.zeros((2, 2))}}}})


def test_what_divides_under_no_alternative_is_refused_with_the_numbers():
    with pytest.raises(UnevenSharding, match=r"heads 3 isn't .*mesh.tensor \(2\)"):
        specs_of(shapes_of(heads=3))


def test_sizes_are_refused_with_config_key_size_and_mesh_axis():
    config = ModelConfig(
        vocabulary=17,
        layers=1,
        width=24,
        heads=6,
        head_dim=4,
        feedforward=32,
        position=positional.make("rope"),
        memory_length=6,
    )
    mesh = MeshConfig(data=2, tensor=4, sequence=4).abstract(32)
    with pytest.raises(UnevenSharding) as error:
        sharding.check(sharding.sizes_of(config, batch=3, length=10), mesh)
    for part in (
        r"training.batch (3) isn't a multiple of mesh.data (2) x mesh.fsdp (1)",
        r"training.length (10) isn't a multiple of mesh.sequence (4)",
        r"model.heads (6) isn't a multiple of mesh.tensor (4)",
        r"model.memory_length (6) isn't a multiple of mesh.sequence (4)",
    ):
        assert part in str(error.value)
    assert "feedforward" not in str(error.value)


def test_memory_is_cut_by_rows_slots_and_width():
    memory = SegmentMemory.empty(2, 4, 8, 16)
    specs = specs_of(memory, rules=sharding.MEMORY)
    batch = ("data", "fsdp")
    assert specs["hidden"] == jax.P(None, batch, ("sequence",), ("tensor",))
    assert specs["at/position"] == jax.P(batch, ("sequence",))
    cache = KeyValueCache.empty(1, 4, 8, 4, 8, jnp.float32, features=2)
    leaves = jax.tree_util.tree_leaves_with_path(cache)
    specs = {
        path_name(path): sharding.spec_of(
            path_name(path), leaf.shape, MESH, sharding.MEMORY
        )
        for path, leaf in leaves
    }
    assert specs["keys/0"] == jax.P(batch, ("tensor",), None, None)
    assert specs["cursor"] == jax.P()


@pytest.mark.parametrize(
    "optimizer",
    [optax.adamw(1e-3), optax.lamb(1e-3), optax.adafactor(1e-3, 8), optax.sgd(1, 0.9)],
    ids=["adamw", "lamb", "adafactor", "momentum"],
)
def test_the_optimiser_s_state_is_cut_as_its_parameters(optimizer):
    params = shapes_of()
    placed = sharding.shardings(params, MESH)
    state = jax.eval_shape(optimizer.init, params)
    found = sharding.optimiser_shardings(state, params, placed, MESH)
    specs = {
        path_name(path): leaf.spec
        for path, leaf in jax.tree_util.tree_leaves_with_path(found)
    }
    shapes = {
        path_name(path): leaf.shape
        for path, leaf in jax.tree_util.tree_leaves_with_path(state)
    }
    assert specs.keys() == shapes.keys()
    # All is cut over fsdp and tensor but what is small.
    for path, spec in specs.items():
        if path.endswith(("/embedding", "/kernel")) and "count" not in path:
            shape = shapes[path]
            assert spec != jax.P() or math.prod(shape) == 1, path
    kernel = "layers/0/attention/query/kernel"  # [16 4 8]
    for path, spec in specs.items():
        if path.endswith("v_row/" + kernel):  # without the largest axis
            assert spec == jax.P(("tensor",), None)
        elif path.endswith("v_col/" + kernel):
            assert spec == jax.P(("fsdp",), ("tensor",))
        elif path.endswith(("mu/" + kernel, "trace/" + kernel)):
            assert spec == jax.P(("fsdp",), ("tensor",), None)


def test_a_mesh_takes_all_devices():
    assert MeshConfig().sizes(8) == dict(zip(AXES, (8, 1, 1, 1), strict=True))
    assert MeshConfig(fsdp=2, sequence=2).sizes(8)["data"] == 2
    with pytest.raises(ValueError, match="has 4 devices, but there are 8"):
        MeshConfig(data=2, tensor=2).sizes(8)
    with pytest.raises(ValueError, match="8 devices can't be dealt"):
        MeshConfig(tensor=3).sizes(8)
    with pytest.raises(ValueError, match="only one axis can be the rest"):
        MeshConfig(fsdp=-1)
    with pytest.raises(ValueError, match="mesh.tensor must be at least 1"):
        MeshConfig(tensor=0)


@pytest.mark.slow
def test_two_processes_are_one_run():
    print(run("tests.training.processes_on_cpu"))


@pytest.mark.slow
def test_the_loss_curve_is_the_same_on_every_mesh_and_checkpoints_fit_all():
    print(run("tests.training.curves_on_devices"))

"""Adaptive embedding and softmax: one distribution, clusters or not, tied or not."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from relpos_jax import where
from relpos_jax.models import AdaptiveConfig, ModelConfig, TransformerXL, adaptive
from relpos_jax.models.config import same_length
from relpos_jax.models.decoder import count_parameters
from relpos_jax.positional import make
from relpos_jax.training.losses import next_token, weighted

VOCABULARY, WIDTH = 20, 8
EVERY = jnp.arange(VOCABULARY, dtype=jnp.int32)


def parameters(config, seed=0, **changes):
    """Random parameters, biases among them."""
    embedding, softmax = adaptive.init(
        config, jax.random.key(seed), VOCABULARY, WIDTH, **changes
    )
    keys = iter(jax.random.split(jax.random.key(seed + 1), 20))
    softmax = {
        name: jax.tree.map(lambda x: jax.random.normal(next(keys), x.shape), part)
        if "bias" in name
        else part
        for name, part in softmax.items()
    }
    return embedding, softmax


def hidden(count, seed=2):
    return jax.random.normal(jax.random.key(seed), (count, WIDTH))


CONFIGS = {
    "narrower": AdaptiveConfig((4, 10), 2),
    "one width": AdaptiveConfig((4, 10)),
    "one width, projected": AdaptiveConfig((4, 10), 1, 6, (False, True, False)),
    "untied projections": AdaptiveConfig((4, 10), 2, 6, (False, False, False)),
    "last cutoff": AdaptiveConfig((19,), 2, None, (), "hugging_face"),
    "four, in order": AdaptiveConfig((1, 2, 7), 1, None, (), "hugging_face"),
    "no clusters": AdaptiveConfig((), 1, 6),
}


@pytest.mark.parametrize("name", CONFIGS)
@pytest.mark.parametrize("tie_tables", [True, False])
def test_losses_are_the_log_probabilities_which_sum_to_one(name, tie_tables):
    config = CONFIGS[name]
    parts = parameters(config, tie_tables=tie_tables)
    x = jnp.broadcast_to(hidden(1), (VOCABULARY, WIDTH))
    full = adaptive.log_probabilities(config, *parts, x)
    np.testing.assert_allclose(np.exp(full).sum(axis=-1), 1, atol=1e-5)
    losses = adaptive.losses(config, *parts, x, EVERY)
    np.testing.assert_allclose(losses, -np.diag(full), atol=1e-5)


@pytest.mark.parametrize("order", ["official", "hugging_face"])
def test_is_the_formula(order):
    """By hand, in float64: tail i's column of the head, times the tail's softmax."""
    config = AdaptiveConfig((4, 10), 2, head_order=order)
    embedding, softmax = jax.tree.map(np.float64, parameters(config))
    x = np.asarray(hidden(1)[0], np.float64)

    def logits(i, extra=(), bias=()):
        table = np.concatenate([embedding["table"][str(i)], *extra])
        offset = np.concatenate([softmax["bias"][str(i)], *bias])
        return table @ (x @ embedding["projection"][str(i)]) + offset

    def share(logits):
        return np.exp(logits) / np.exp(logits).sum()

    head = share(logits(0, [softmax["cluster"]], [softmax["cluster_bias"]]))
    columns = (5, 4) if order == "official" else (4, 5)
    tails = [head[c] * share(logits(i)) for i, c in zip((1, 2), columns, strict=True)]
    wanted = np.log(np.concatenate([head[:4], *tails]))
    found = adaptive.log_probabilities(config, *parameters(config), hidden(1))
    np.testing.assert_allclose(found[0], wanted, atol=1e-5)
    row = embedding["projection"]["1"] @ embedding["table"]["1"][3]
    found = adaptive.embed(config, parameters(config)[0], EVERY, jnp.float32)
    np.testing.assert_allclose(found[7], row, atol=1e-6)


@pytest.mark.parametrize("missing", [None, 0, 1, 2])
def test_chunks_change_no_number_and_no_gradient(missing):
    """Also where a cluster, the shortlist or a tail, has no target at all."""
    config = CONFIGS["one width, projected"]
    parts, x = parameters(config), hidden(30)
    targets = jax.random.randint(jax.random.key(5), (30,), 0, VOCABULARY)
    if missing is not None:
        start, stop = config.ranges(VOCABULARY)[missing]
        inside = (targets >= start) & (targets < stop)
        targets = jnp.where(inside, stop % VOCABULARY, targets)

    @functools.partial(jax.jit, static_argnames="chunk")
    @functools.partial(jax.value_and_grad, argnums=(0, 1), has_aux=True)
    def both(parts, x, chunk):
        losses = adaptive.losses(config, *parts, x, targets, chunk=chunk)
        return losses.mean(), losses

    whole, pieces = both(parts, x, 1024), both(parts, x, 7)
    close = functools.partial(np.testing.assert_allclose, rtol=1e-5, atol=1e-6)
    jax.tree.map(close, whole, pieces)
    assert all(np.isfinite(leaf).all() for leaf in jax.tree.leaves(whole))
    full = adaptive.log_probabilities(config, *parts, x)
    wanted = -np.take_along_axis(np.asarray(full), np.asarray(targets)[:, None], 1)
    close(whole[0][1], wanted[:, 0])


@pytest.mark.parametrize("wrong", [-1, VOCABULARY, 10**6])
@pytest.mark.parametrize("name", ["narrower", "no clusters"])
def test_an_id_outside_the_vocabulary_gives_nan_there_alone(name, wrong):
    config = CONFIGS[name]
    parts = parameters(config)
    ids = jnp.asarray([3, wrong, 19])
    for chunk in (2, 8):
        losses = adaptive.losses(config, *parts, hidden(3), ids, chunk=chunk)
        assert np.isnan(losses).tolist() == [False, True, False]
    rows = adaptive.embed(config, parts[0], ids, jnp.float32)
    assert np.isnan(rows).all(axis=1).tolist() == [False, True, False]


def model_config(**changes):
    sizes = dict(vocabulary=20, layers=1, width=8, heads=2, head_dim=4, feedforward=8)
    return ModelConfig(**sizes, position=make("transformer_xl"), **changes)


@functools.cache
def inputs():
    tokens = jax.random.randint(jax.random.key(3), (2, 9), 0, VOCABULARY)
    return tokens[:, :-1], tokens[:, 1:], where.contiguous(2, 8)


@pytest.mark.parametrize("tie", [True, False])
def test_no_cutoffs_is_a_plain_softmax(tie):
    tokens, targets, at = inputs()
    plain = model_config(tie_embeddings=tie, output_bias=True)
    clustered = dataclasses.replace(plain, adaptive=AdaptiveConfig())
    first = TransformerXL(plain, key=jax.random.key(0))
    second = TransformerXL(clustered, key=jax.random.key(0))
    bias = jax.random.normal(jax.random.key(1), (20,))
    first.output_bias[...] = second.softmax["bias"]["0"][...] = bias
    second.embedding["table"]["0"][...] = first.embedding[...]
    if not tie:
        second.softmax["table"]["0"][...] = first.output[...]
    assert count_parameters(plain) == count_parameters(clustered)
    memory = first.init_memory(2)
    wanted, _ = first.losses(tokens, targets, at, memory)
    found, _ = second.losses(tokens, targets, at, memory)
    np.testing.assert_allclose(found, wanted, atol=1e-6)
    logits, _ = second(tokens, at, memory)
    plain_logits, _ = first(tokens, at, memory)
    np.testing.assert_allclose(logits, jax.nn.log_softmax(plain_logits), atol=1e-5)


def test_plain_losses_are_those_of_the_logits_bit_for_bit():
    model = TransformerXL(model_config(), key=jax.random.key(0))
    tokens, targets, at = inputs()
    weight = jnp.ones((2, 8)).at[0, 3:].set(0)
    targets = jnp.where(weight > 0, targets, -1)

    @jax.jit
    def both(model):
        logits, _ = model(tokens, at, model.init_memory(2))
        losses, _ = model.losses(
            tokens, targets, at, model.init_memory(2), weight=weight
        )
        return next_token(logits, targets, weight), weighted(losses, weight)

    graphdef, params = nnx.split(model)
    first, second = jax.jit(lambda p: both(nnx.merge(graphdef, p)))(params)
    assert first == second


def test_where_nothing_is_scored_nothing_is_read():
    config = model_config(adaptive=CONFIGS["narrower"], output_bias=True)
    graphdef, params = nnx.split(TransformerXL(config, key=jax.random.key(0)))
    tokens, targets, at = inputs()
    weight = jnp.ones((2, 8)).at[1, 4:].set(0)
    at = at._replace(segment=weight.astype(jnp.int32))  # the rest is padding
    bad = tokens.at[1, 4:].set(99), jnp.where(weight > 0, targets, -7)

    def loss(params, tokens, targets):
        model = nnx.merge(graphdef, params)
        memory = model.init_memory(2)
        losses, _ = model.losses(tokens, targets, at, memory, weight=weight)
        return weighted(losses, weight).loss

    assert jax.jit(loss)(params, *bad) == jax.jit(loss)(params, tokens, targets)


def test_tied_matrices_are_one_leaf():
    tied = model_config(adaptive=AdaptiveConfig((4, 10), 2))
    embedding = 4 * 8 + 6 * 4 + 10 * 2 + 8 * (8 + 4 + 2)
    rest = count_parameters(tied) - embedding - 2 * 8
    own = AdaptiveConfig((4, 10), 2, tie_projections=(False,) * 3)
    untied = dataclasses.replace(tied, adaptive=own, tie_embeddings=False)
    assert count_parameters(untied) == rest + 2 * embedding + 2 * 8
    half = AdaptiveConfig((4, 10), 2, tie_projections=(False, True, True))
    half = dataclasses.replace(tied, adaptive=half)
    assert count_parameters(half) == count_parameters(tied) + 8 * 8


@pytest.mark.parametrize(
    "knobs, message",
    [
        ({"cutoffs": (10, 4)}, "adaptive.cutoffs must ascend"),
        ({"cutoffs": (4, 4)}, "adaptive.cutoffs must ascend"),
        ({"cutoffs": (0, 4)}, "adaptive.cutoffs must be at least 1"),
        ({"cutoffs": (4, 20)}, "adaptive.cutoffs must be below the vocabulary of 20"),
        ({"cutoffs": (4, 10), "div_val": 4}, "adaptive.div_val 4 leaves the last"),
        ({"div_val": 0}, "adaptive.div_val must be positive"),
        ({"embed_dim": 0}, "adaptive.embed_dim must be positive"),
        ({"cutoffs": (4,), "tie_projections": (True,)}, "1 flags for 2 clusters"),
    ],
)
def test_wrong_settings_name_their_field(knobs, message):
    with pytest.raises(ValueError, match=message):
        model_config(adaptive=AdaptiveConfig(**knobs))


def test_memory_of_zeros_is_attended():
    config = model_config(memory_length=3, memory_start="zeros", norm="post")
    model = TransformerXL(config, key=jax.random.key(0))
    memory = model.init_memory(2)
    assert memory.at.position.tolist() == [[-3, -2, -1]] * 2
    assert np.all(memory.at.segment == 1) and not np.any(memory.hidden)
    tokens, _, at = inputs()
    zeros, _ = model(tokens, at, memory)
    none, _ = model(tokens, at, memory._replace(at=where.empty(2, 3)))
    assert np.abs(zeros - none).max() > 1e-3
    with pytest.raises(ValueError, match="memory_start must be one of"):
        model_config(memory_start="noise")


def test_same_length_has_two_counts():
    assert (same_length(4), same_length(4, "tensorflow")) == (4, 5)
    at = where.contiguous(1, 4, start=4)
    seen = where.concatenate(where.contiguous(1, 4), at)
    for count, keys in (("pytorch", 4), ("tensorflow", 5)):
        config = model_config(memory_length=4, window=same_length(4, count))
        mask = np.asarray(config.masks[0](at, seen))[0]
        assert (mask.sum(axis=1) == keys).all()
        # In TensorFlow's the first query sees the oldest slot, in PyTorch's nobody.
        assert mask[:, 0].tolist() == [keys == 5, False, False, False]
    with pytest.raises(ValueError, match="same_length needs memory"):
        same_length(0)
    with pytest.raises(ValueError, match="count must be"):
        same_length(4, "torch")

"""Compressive memory: which states are compressed, where slots stand, what learns."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from relpos_jax import where
from relpos_jax.masks import Causal
from relpos_jax.memory import CompressiveConfig, CompressiveMemory, compression
from relpos_jax.memory.compression import Leaving, compress
from relpos_jax.models import ModelConfig, TransformerXL
from relpos_jax.models.compressing import attention_received
from relpos_jax.positional import make
from relpos_jax.training import sharding
from relpos_jax.where import Where

MEAN = dict(function="mean", loss=None)


@functools.cache
def build(position="transformer_xl", **changes):
    config = ModelConfig(
        vocabulary=13,
        layers=2,
        width=16,
        heads=2,
        head_dim=8,
        feedforward=24,
        position=make(position),
        **changes,
    )
    model = TransformerXL(config, key=jax.random.key(0))
    graphdef, params = nnx.split(model)

    @functools.partial(jax.jit, static_argnames="spacing")
    def forward(*inputs, spacing="unit"):
        return nnx.merge(graphdef, params)(*inputs, spacing=spacing)

    return model, forward


def compressive(function="convolution", length=3, rate=4, memory=4, **more):
    config = CompressiveConfig(length, rate, function, **more)
    return build(memory_length=memory, compressive=config)


def cut(at, part):
    return jax.tree.map(lambda x: x[:, part], at)


def read(forward, tokens, at, memory, step, spacing="unit"):
    rows = []
    for begin in range(0, tokens.shape[1], step):
        part = slice(begin, begin + step)
        logits, memory = forward(
            tokens[:, part], cut(at, part), memory, spacing=spacing
        )
        rows.append(logits)
    return np.asarray(jnp.concatenate(rows, axis=1)), memory


@pytest.fixture(scope="module")
def tokens():
    return jax.random.randint(jax.random.key(1), (2, 24), 0, 13)


def test_rate_1_and_no_slots_are_segment_memory(tokens):
    at = where.contiguous(2, 24)
    model, forward = build(memory_length=8)
    wanted, memory = read(forward, tokens, at, model.init_memory(2), 4)
    model, forward = compressive(length=0, memory=8, **MEAN)
    found, plain = read(forward, tokens, at, model.init_memory(2), 4)
    np.testing.assert_array_equal(found, wanted)
    np.testing.assert_array_equal(plain.hidden, memory.hidden)
    model, forward = compressive(length=4, rate=1, memory=4, **MEAN)
    found, other = read(forward, tokens, at, model.init_memory(2), 4)
    np.testing.assert_allclose(found, wanted, atol=1e-5)
    both = np.concatenate([other.compressed, other.hidden], axis=2)
    np.testing.assert_allclose(both, memory.hidden, atol=1e-5)


def plain_fifo(stream, segment, step, length, slots, rate):
    """Means, positions and documents that are left after each call, by plain lists."""
    states, kept, began = [], [], False
    for begin in range(0, len(stream), step):
        for state in zip(
            stream[begin : begin + step], segment[begin : begin + step], strict=True
        ):
            began = began or state[1] != 0
            if began:  # groups are counted from the first token
                states.append(state)
        while len(states) - length >= rate:
            group, states = states[:rate], states[rate:]
            newest = [s for _, s in group if s][-1:] or [0]
            mine = [x for x, s in group if s == newest[0] != 0]
            kept.append((np.mean(mine) if mine else 0, max(mine, default=0), newest[0]))
        kept = kept[len(kept) - slots :] if len(kept) > slots else kept
        yield kept, states


@pytest.mark.parametrize("step, length, slots, rate", [(4, 8, 3, 4), (3, 5, 2, 4)])
@pytest.mark.parametrize("documents", [False, True])
def test_memories_hold_what_plain_lists_hold(step, length, slots, rate, documents):
    count = 12 * step
    stream = np.arange(1, count + 1)
    segment = np.ones(count, int)
    if documents:
        # Padding in front; a document ends in a group, and one is within a group.
        segment[:2] = 0
        segment[10:] += 1
        segment[15:] += 1
        segment[17:] += 1
    memory = CompressiveMemory.empty(1, 1, length, slots, 1, rate=rate)
    config = CompressiveConfig(slots, rate, **MEAN)
    wanted = plain_fifo(stream, segment, step, length, slots, rate)
    for begin, (kept, states) in zip(range(0, count, step), wanted, strict=True):
        part = slice(begin, begin + step)
        at = Where(*(jnp.asarray(x[None, part], jnp.int32) for x in (stream, segment)))
        x = jnp.asarray(stream[None, part, None], jnp.float32)
        _, _, entry = memory.read(0, x, at, lambda x: x)
        slot = compress(config, {}, memory.leaving(0, entry, at))
        memory = memory.write([entry._replace(slots=slot.states, at=slot.at)], at)
        empty = slots - len(kept)
        assert not np.any(memory.compressed_at.segment[0, 0, :empty])
        for i, (mean, position, document) in enumerate(kept, start=empty):
            assert float(memory.compressed[0, 0, i, 0]) == pytest.approx(mean)
            assert int(memory.compressed_at.segment[0, 0, i]) == document
            if document:
                assert int(memory.compressed_at.position[0, 0, i]) == position
        real = [(x, s) for x, s in states if s]
        mine = np.asarray(memory.at.segment[0]) != 0
        left = np.asarray(memory.hidden[0, 0, :, 0])[mine].tolist()
        assert left == [x for x, _ in real]


def test_a_dilated_convolution_looks_back_on_the_group_before():
    states = jnp.arange(1.0, 9.0).reshape(1, 8, 1)
    leaving = Leaving(states, where.contiguous(1, 8), jnp.array([2]))
    params = {"kernel": jnp.ones((4, 1, 1)) * 10.0 ** jnp.arange(4)[:, None, None]}
    params["bias"] = jnp.zeros(1)
    found = compress(CompressiveConfig(2), params, leaving).states[0, :, 0]
    np.testing.assert_allclose(found, [4321, 8765])
    config = CompressiveConfig(2, function="dilated_convolution")
    found = compress(config, params, leaving).states[0, :, 0]
    np.testing.assert_allclose(found, [4200, 8642])
    # Another document's states count as zeros.
    at = Where(leaving.at.position, jnp.array([[1, 1, 1, 1, 1, 2, 2, 2]]))
    slots = compress(config, params, leaving._replace(at=at))
    np.testing.assert_allclose(slots.states[0, :, 0], [4200, 8600])
    assert slots.members[0].tolist() == [True] * 4 + [False] + [True] * 3


def test_most_used_keeps_the_most_used_in_their_order():
    usage = jnp.array([[0.1, 0.9, 0.2, 0.3, 0.8, 0.7, 0.0, 5.0]])
    states = jnp.arange(8.0).reshape(1, 8, 1)
    config = CompressiveConfig(9, 2, "most_used", loss=None)
    at = where.contiguous(1, 8)
    at = at._replace(segment=at.segment.at[:, 6:].set(0))  # only three groups leave
    slots = compress(config, {}, Leaving(states, at, jnp.array([3]), usage))
    assert slots.at.position[0].tolist()[:3] == [1, 4, 5]
    assert slots.at.segment[0].tolist() == [1, 1, 1, 0]
    assert slots.states[0, :, 0].tolist() == [1, 4, 5, 0]


def test_received_attention_is_the_sum_of_the_weights():
    q, k, v = jax.random.normal(jax.random.key(0), (3, 2, 5, 2, 4))
    at = where.contiguous(2, 5)

    def weights(q, k):
        logits = jnp.einsum("bqhd,bkhd->bhqk", q, k) / 2
        seen = Causal()(at, at)[:, None]
        return jax.nn.softmax(jnp.where(seen, logits, -jnp.inf), axis=-1)

    def attention(q, k, v):
        return jnp.einsum("bhqk,bkhd->bqhd", weights(q, k), v)

    found = attention_received(attention, q, k, v)
    np.testing.assert_allclose(found, weights(q, k).sum((1, 2)), atol=1e-6)


@pytest.mark.parametrize("function", ["convolution", "most_used"])
@pytest.mark.parametrize(
    "memory, step", [(4, 4), pytest.param(5, 3, marks=pytest.mark.slow)]
)
def test_token_by_token_is_segment_by_segment(tokens, function, memory, step):
    model, forward = compressive(function)
    at = where.contiguous(2, 24)
    start = functools.partial(model.init_memory, 2, memory, slots=3)
    wanted, last = read(forward, tokens, at, start(), step)
    found, other = read(forward, tokens, at, start(every=step), 1)
    np.testing.assert_allclose(found, wanted, atol=2e-5)
    np.testing.assert_allclose(other.compressed, last.compressed, atol=2e-5)
    # Rows that begin with padding, in calls that are aligned at their ends.
    padded = jnp.pad(tokens[:1], ((0, 0), (step, 0)))
    places = jax.tree.map(lambda x: jnp.pad(x[:1], ((0, 0), (step, 0))), at)
    pair = jnp.concatenate([padded, jnp.pad(tokens[1:], ((0, 0), (0, step)))])
    long = where.contiguous(1, 24 + step)
    places = jax.tree.map(lambda x, y: jnp.concatenate([x, y]), places, long)
    start = functools.partial(start, ragged=True, every=step)
    found, _ = read(forward, pair, places, start(), 1, "rising")
    np.testing.assert_allclose(found[0, step:], wanted[0], atol=2e-5)
    np.testing.assert_allclose(found[1, :24], wanted[1], atol=2e-5)


def test_documents_do_not_mix(tokens):
    model, forward = compressive(function="convolution")
    # Row 1's second document begins in the middle of a group.
    row = [[*range(24)], [*range(6), *range(18)]]
    at = Where(jnp.array(row), jnp.array([[1] * 24, [1] * 6 + [2] * 18]))
    found, memory = read(forward, tokens, at, model.init_memory(2), 4)
    assert np.isfinite(found).all()
    assert memory.compressed_at.segment[0].tolist() == [[1] * 3, [2] * 3]
    changed = tokens.at[:, :6].set((tokens[:, :6] + 1) % 13)
    other, _ = read(forward, changed, at, model.init_memory(2), 4)
    np.testing.assert_array_equal(other[1, 6:], found[1, 6:])
    assert np.abs(other[0, -4:] - found[0, -4:]).max() > 1e-5


def test_nothing_known_of_positions_gives_the_same(tokens):
    model, forward = compressive(function="convolution")
    at = where.contiguous(2, 24)
    unit, _ = read(forward, tokens, at, model.init_memory(2), 4)
    for spacing in ("rising", "any"):
        other, _ = read(forward, tokens, at, model.init_memory(2), 4, spacing)
        np.testing.assert_allclose(other, unit, atol=1e-5)


@pytest.mark.parametrize(
    "loss", ["attention", pytest.param("autoencoding", marks=pytest.mark.slow)]
)
def test_losses_teach_the_compression_and_nothing_else(tokens, loss):
    model, forward = compressive("convolution", loss=loss)
    at = where.contiguous(2, 24)
    _, memory = read(forward, tokens, at, model.init_memory(2), 4)
    graphdef, params = nnx.split(model)
    here, part = tokens[:, :4], cut(where.contiguous(2, 4, start=24), slice(4))

    @jax.jit
    def gradients(params):
        def both(params):
            model = nnx.merge(graphdef, params)
            task, after = model.losses(here, here, part, memory, auxiliary=True)
            return jnp.stack([task.sum(), after.auxiliary[0]]), after.auxiliary

        _, pull, auxiliary = jax.vjp(both, params, has_aux=True)
        return [pull(row)[0] for row in jnp.eye(2)], auxiliary

    (task, lost), auxiliary = gradients(nnx.as_pure(params))
    assert float(auxiliary[0]) > 0
    count = 2 * 2 * 4  # layers, rows; queries or states
    assert float(auxiliary[1]) == count
    size = {True: [0.0, 0.0], False: [0.0, 0.0]}
    for i, tree in enumerate((task, lost)):
        for path, leaf in jax.tree_util.tree_leaves_with_path(tree):
            mine = "compression" in jax.tree_util.keystr(path)
            size[mine][i] += float(jnp.abs(leaf).sum())
    assert size[True][0] == 0 and size[True][1] > 0
    assert size[False][0] > 0 and size[False][1] == 0
    kernel = lost["layers"][1]["attention"]["compression"]["kernel"]
    assert float(jnp.abs(kernel).max()) > 0


def test_losses_are_the_plain_formulas():
    parts = jax.random.normal(jax.random.key(2), (5, 1, 8, 2, 4))
    q, k, v, new_k, new_v = parts
    at, slots_at = where.contiguous(1, 8), where.contiguous(1, 2)

    def plain(k, v):
        weights = jax.nn.softmax(jnp.einsum("bqhd,bkhd->bhqk", q, k) / 2, axis=-1)
        return jnp.einsum("bhqk,bkhd->bqhd", weights, v)

    new = new_k[:, :2], new_v[:, :2]
    found = compression.attention_loss(q, (k, v), new, at, at, slots_at)
    wanted = jnp.mean((plain(k, v) - plain(*new)) ** 2)
    assert float(found[0] / found[1]) == pytest.approx(float(wanted), rel=1e-5)
    # A query without old states is not counted.
    away = at._replace(segment=at.segment.at[:, :3].set(7))
    assert float(compression.attention_loss(q, (k, v), new, away, at, slots_at)[1]) == 5

    states = parts[0].reshape(1, 8, 8)
    config = CompressiveConfig(2, loss="autoencoding")
    params = compression.init(config, 8)
    leaving = Leaving(states, at, jnp.array([2]))
    slots = compress(config, params, leaving)
    # It starts as the mean, and so each state is rebuilt as its group's mean.
    mean = states.reshape(1, 2, 4, 8).mean(2, keepdims=True)
    wanted = jnp.mean((states.reshape(1, 2, 4, 8) - mean) ** 2)
    found = compression.autoencoding_loss(params, leaving, slots)
    assert float(found[0] / found[1]) == pytest.approx(float(wanted), rel=1e-5)


def test_rates_and_lengths_may_change_at_evaluation(tokens):
    model, forward = compressive(**MEAN)
    at = where.contiguous(2, 24)
    memory = model.init_memory(2, 2, slots=5, rate=2)
    found, memory = read(forward, tokens, at, memory, 4)
    assert np.isfinite(found).all()
    assert memory.compressed_at.position[0, 0].tolist() == [13, 15, 17, 19, 21]
    shared = model.init_memory(2, 14)
    assert (shared.length, shared.slots) == (8, 6)
    assert model.init_memory(2, 0).layout(True).offset == 0
    model, forward = compressive("convolution")
    with pytest.raises(ValueError, match="rate 4 that it was trained at, not at 2"):
        read(forward, tokens, at, model.init_memory(2, rate=2), 4)


@pytest.mark.parametrize(
    "values, message",
    [
        (dict(length=-1), "length must be at least 0"),
        (dict(length=1, rate=0), "rate must be at least 1"),
        (dict(length=1, function="median"), "function must be one of"),
        (dict(length=1, loss="bptt"), "loss must be 'attention'"),
        (dict(length=1, loss=None), "trained by the auxiliary loss alone"),
        (dict(length=1, loss_weight=0.0), "trained by the auxiliary loss alone"),
        (dict(length=1, function="most_used", loss="autoencoding"), "keeps states"),
    ],
)
def test_settings_that_make_no_sense_are_refused(values, message):
    with pytest.raises(ValueError, match=message):
        CompressiveConfig(**values)


@pytest.mark.parametrize("function", ["convolution", "most_used"])
def test_the_tables_of_a_mesh_know_memory_and_parameters(function):
    names = ("data", "fsdp", "tensor", "sequence")
    mesh = jax.sharding.AbstractMesh((2, 1, 2, 1), names)
    model, _ = compressive(function)
    params = nnx.as_pure(nnx.split(model)[1])
    rules = (params, sharding.PARAMETERS), (model.init_memory(4), sharding.MEMORY)
    cut = {}
    for tree, table in rules:
        for path, leaf in jax.tree_util.tree_leaves_with_path(tree):
            name = sharding.path_name(path)
            cut[name] = sharding.spec_of(name, leaf.shape, mesh, table)
    assert cut["compressed"][1] == cut["hidden"][1] == ("data", "fsdp")


def test_models_that_make_no_sense_are_refused():
    slots = CompressiveConfig(4)
    with pytest.raises(ValueError, match="absolute position embeddings"):
        build("sinusoidal", compressive=slots)
    with pytest.raises(ValueError, match="memory_start='zeros'"):
        build(memory_start="zeros", memory_length=4, compressive=slots)
    with pytest.raises(ValueError, match="config.compressive is None"):
        build(memory_length=4)[0].init_memory(2, slots=3)
    model, forward = compressive("convolution")
    with pytest.raises(ValueError, match="memory is for batch 3"):
        forward(
            jnp.zeros((2, 4), jnp.int32), where.contiguous(2, 4), model.init_memory(3)
        )

"""Stretched rotary embeddings: published values, lengths as data, checkpoints."""

import math

import jax
import jax.numpy as jnp
import ml_collections
import numpy as np
import pytest
from flax import nnx

from relpos_jax import where
from relpos_jax.attention import attend
from relpos_jax.models import ModelConfig, TransformerXL
from relpos_jax.positional import make
from relpos_jax.positional.rope import Rope
from relpos_jax.positional.rope_checkpoint import rope_from_config, scaling_from_dict
from relpos_jax.positional.rope_frequencies import (
    correction_range,
    document_lengths,
    inverse_frequencies,
    longrope_attention_factor,
    yarn_attention_factor,
)
from relpos_jax.positional.rope_scaling import RopeScaling, scaling_of
from relpos_jax.where import Where


def plain(dim, base=10000.0):
    return np.array([base ** (-2 * i / dim) for i in range(dim // 2)])


def test_linear_maps_position_8_to_2():
    found = RopeScaling("linear", 4.0).frequencies(8)
    np.testing.assert_allclose(8 * found, 2 * plain(8), rtol=1e-6)


def test_ntk_is_the_base_of_the_article():
    base = 10000.0 * 4 ** (64 / 62)
    found = RopeScaling("ntk", 4.0).frequencies(64)
    np.testing.assert_allclose(found, plain(64, base), rtol=1e-6)
    assert found[0] == 1 and found[-1] == pytest.approx(plain(64)[-1] / 4)


@pytest.mark.parametrize(
    "factor, base", [(2.0, 30527.74), (1.0, 20221.26), (4.0, 51293.79)]
)
def test_dynamic_ntk_bases(factor, base):
    # Fault B18: d 128, length 4096 of 2048.
    scaling = RopeScaling("dynamic_ntk", factor, 2048)
    lengths = jnp.asarray([1, 2048, 4096])
    found = scaling.frequencies(128, length=lengths)
    np.testing.assert_allclose(found[:2], [plain(128)] * 2, rtol=1e-6)
    np.testing.assert_allclose(found[2], plain(128, base), rtol=2e-6)


def test_ntk_by_parts_plane_by_plane():
    # Peng et al. 2023, equations 17-20.
    found = RopeScaling("ntk_by_parts", 16.0, 4096).frequencies(128)
    for i, theta in enumerate(plain(128)):
        turns = 4096 * theta / (2 * math.pi)
        gamma = min(max((turns - 1) / (32 - 1), 0), 1)
        assert found[i] == pytest.approx((1 - gamma) * theta / 16 + gamma * theta, 1e-6)


def test_both_ramps_of_plane_32():
    # REFERENCE 2.11: .178 in turns against .538 in the index.
    assert correction_range(128, 10000.0, 4096, 32.0, 1.0) == (20, 46)
    for ramp, gamma in (("turns", 0.178), ("dimension", 0.538)):
        scaling = RopeScaling("yarn", 16.0, 4096, ramp=ramp)
        ratio = scaling.frequencies(128)[32] / plain(128)[32]
        assert (ratio - 1 / 16) / (15 / 16) == pytest.approx(gamma, abs=6e-4)


@pytest.mark.parametrize(
    "factor, amplitude",
    [(4.0, 1.138629), (40.0, 1.368888), (64.0, 1.415888), (128.0, 1.485203), (1.0, 1)],
)
def test_attention_factors_are_taken_once(factor, amplitude):
    # Fault B20.
    yarn = Rope(scaling=RopeScaling("yarn", factor, 4096))
    assert yarn.scaling.amplitude() == pytest.approx(amplitude, abs=1e-6)
    x, at = jnp.ones((1, 1, 1, 8)), where.contiguous(1, 1)
    q, k = yarn.query({}, x, at), yarn.key({}, x, at)
    assert float(jnp.sum(q * k)) == pytest.approx(8 * amplitude**2, rel=1e-6)
    explicit = RopeScaling("yarn", factor, 4096, attention_factor=1.0)
    assert explicit.amplitude() == 1.0


def test_attention_factors_of_deepseek_and_longrope():
    scaling = RopeScaling("yarn", 40.0, 4096, mscale=0.707, mscale_all_dim=1.0)
    wanted = (0.0707 * math.log(40) + 1) / (0.1 * math.log(40) + 1)
    assert scaling.amplitude() == pytest.approx(wanted)
    assert yarn_attention_factor(0.5) == 1.0
    assert longrope_attention_factor(32.0, 4096) == pytest.approx(1.190238, abs=1e-6)


def test_llama3_ratios():
    # Fault B23.
    def ratios(dim, factor):
        scaling = RopeScaling(
            "llama3", factor, 8192, low_freq_factor=1.0, high_freq_factor=4.0
        )
        return scaling.frequencies(dim, 500000.0) / plain(dim, 500000.0)

    small = ratios(64, 32.0)
    np.testing.assert_allclose(small[:15], 1, rtol=1e-6)
    np.testing.assert_allclose(small[15:18], [0.605573, 0.303743, 0.103448], atol=2e-6)
    np.testing.assert_allclose(small[18:], 0.03125, rtol=1e-6)
    large = ratios(128, 8.0)
    assert np.sum(np.asarray(large) > 1 - 1e-6) == 29
    assert large[29] == pytest.approx(0.828168, abs=2e-6)
    assert large[34] > 0.126 and large[35] == pytest.approx(0.125)


def test_longrope_takes_one_table_a_document():
    short, long = (1.0, 1.1, 1.2, 1.3), (1.0, 2.0, 3.0, 4.0)
    scaling = RopeScaling("longrope", 2.0, 16, short_factor=short, long_factor=long)
    found = scaling.frequencies(8, length=jnp.asarray([16, 17]))
    np.testing.assert_allclose(found, plain(8) / np.array([short, long]), rtol=1e-6)
    # Without factors: as they are up to L, Position Interpolation past it.
    empty = RopeScaling("longrope", 2.0, 16).frequencies(8, length=jnp.asarray([9, 17]))
    np.testing.assert_allclose(empty, plain(8) / np.array([[1], [2]]), rtol=1e-6)
    with pytest.raises(ValueError, match="'short_factor' has 4 numbers, but 8 planes"):
        scaling.frequencies(16)


def test_start_tokens_are_not_stretched():
    scaling = {"kind": "longrope", "factor": 2.0, "original_length": 4}
    scaling |= {"short_factor": (4.0,) * 4, "long_factor": (4.0,) * 4}
    encoding = make(
        "rope", scaling=scaling | {"start_tokens": 2, "attention_factor": 1}
    )
    assert not encoding.invariant and not encoding.length_dependent
    x = jax.random.normal(jax.random.key(0), (1, 5, 1, 8))
    at = where.contiguous(1, 5)
    found = encoding.query({}, x, at)
    position = jnp.asarray([[0, 1, 0.5, 0.75, 1]])
    wanted = Rope().query({}, x, at._replace(position=position))
    np.testing.assert_allclose(found, wanted, atol=1e-6)


def test_document_lengths_are_each_document_s_own():
    at = Where(
        jnp.asarray([[0, 1, 2, 0, 1, 0, 9], [4, 5, 0, 0, 7, 8, 0]]),
        jnp.asarray([[5, 5, 5, 2, 2, 0, 0], [1, 1, 0, 3, 1, 1, 0]]),
    )
    q_at = jax.tree.map(lambda x: x[:, :2], at)
    q_length, k_length = document_lengths(q_at, at)
    real = np.asarray(at.segment) != 0
    wanted = np.array([[3, 3, 3, 2, 2, 0, 0], [9, 9, 0, 1, 9, 9, 0]])
    np.testing.assert_array_equal(np.where(real, k_length, 0), wanted)
    np.testing.assert_array_equal(q_length, wanted[:, :2])


FOLLOWING = {
    "dynamic_ntk": {"factor": 2.0},
    "longrope": {"factor": 4.0},
    "yarn": {"dynamic": True},
}


def outputs(encoding, x, at, queries):
    """Returns attention of the last `queries` tokens over all of them."""
    last = jax.tree.map(lambda y: y[:, -queries:], at)
    return attend(encoding, {}, x[:, -queries:], x, x, last, at)


@pytest.mark.parametrize(
    "kind",
    [
        pytest.param(kind, marks=[pytest.mark.slow] if place else [])
        for place, kind in enumerate(FOLLOWING)
    ],
)
def test_rows_documents_and_chunks_follow_their_own_length(kind):
    # Faults B18 and B22, original length 8: in one batch and one row, and in chunks.
    scaling = {"kind": kind, "original_length": 8, **FOLLOWING[kind]}
    encoding = make("rope", scaling=scaling)
    assert encoding.length_dependent and not encoding.invariant
    x = jax.random.normal(jax.random.key(1), (1, 20, 1, 8))
    long, short = x[:, :14], x[:, 14:]
    alone = [outputs(encoding, part, where.contiguous(1, n), n)
             for part, n in ((long, 14), (short, 6))]  # fmt: skip
    together = outputs(encoding, x, where.packed((14, 6), 20), 20)
    np.testing.assert_allclose(together[:, :14], alone[0], atol=1e-5)
    np.testing.assert_allclose(together[:, 14:], alone[1], atol=1e-5)
    rows = jnp.concatenate([long, jnp.pad(short, ((0, 0), (0, 8), (0, 0), (0, 0)))])
    found = outputs(encoding, rows, where.from_lengths(jnp.asarray([14, 6]), 14), 14)
    np.testing.assert_allclose(found[:1], alone[0], atol=1e-5)
    np.testing.assert_allclose(found[1:, :6], alone[1], atol=1e-5)
    # The last tokens alone, over kept keys, are the last rows of the whole: one table.
    step = outputs(encoding, long, where.contiguous(1, 14), 2)
    np.testing.assert_allclose(step, alone[0][:, -2:], atol=1e-5)
    # And the length mattered.
    unscaled = outputs(Rope(), long, where.contiguous(1, 14), 14)
    assert np.abs(unscaled - alone[0]).max() > 1e-3
    with pytest.raises(ValueError, match="the params that `prepare` returns"):
        encoding.query({}, x, where.contiguous(1, 20))


def test_scaling_is_a_dict_in_configs():
    fields = {"kind": "yarn", "factor": 4, "original_length": 2048}
    wanted = Rope(scaling=RopeScaling("yarn", 4.0, 2048))
    assert make("rope", scaling=fields) == wanted
    assert scaling_of(ml_collections.ConfigDict(fields)) == wanted.scaling
    assert hash(wanted) == hash(make("rope", scaling=fields))
    with pytest.raises(ValueError, match="did you mean 'factor'"):
        make("rope", scaling={"kind": "linear", "facter": 2.0})
    with pytest.raises(ValueError, match="must be a RopeScaling or a dict"):
        scaling_of(3.0)


@pytest.mark.parametrize(
    "fields, message",
    [
        ({"kind": "yarm"}, "did you mean 'yarn'"),
        ({"kind": "linear"}, "needs 'factor'"),
        ({"kind": "linear", "factor": 0.5}, "'factor' must be at least 1"),
        ({"kind": "linear", "factor": 2.0, "original_length": 4}, "does not read"),
        ({"kind": "ntk", "factor": 2.0, "dynamic": True}, "cannot be dynamic"),
        ({"kind": "yarn", "factor": 2.0}, "needs 'original_length'"),
        ({"kind": "yarn", "beta_fast": 1.0, "beta_slow": 2.0}, "'beta_slow' must be"),
        ({"kind": "yarn", "ramp": "index"}, "'ramp' must be one of"),
        ({"kind": "yarn", "ramp": "turns", "truncate": False}, "'truncate' rounds"),
        ({"kind": "yarn", "mscale": 1.0}, "come together"),
        (
            {"kind": "yarn", "mscale": 1, "mscale_all_dim": 1, "attention_factor": 1},
            "contradicts 'mscale'",
        ),
        ({"kind": "yarn", "attention_factor": 0.0}, "must be positive"),
        ({"kind": "longrope", "long_factor": (-1.0,)}, "must be positive"),
        ({"kind": "longrope", "dynamic": True, "short_factor": (1.0,)}, "one set"),
        (
            {"kind": "llama3", "low_freq_factor": 4.0, "high_freq_factor": 1.0},
            "'low_freq_factor' must be",
        ),
        ({"kind": "llama3", "low_freq_factor": 1.0}, "needs 'high_freq_factor'"),
        ({"kind": "linear", "dynamic": True}, "needs 'original_length'"),
    ],
)
def test_what_makes_no_sense_is_refused(fields, message):
    if fields["kind"] in ("yarn", "longrope", "llama3") and "factor" not in fields:
        fields = {"factor": 2.0, "original_length": 64} | fields
    with pytest.raises(ValueError, match=message):
        scaling_of(fields)


def test_checkpoints_old_and_new_spellings():
    wanted = RopeScaling("linear", 4.0)
    for key in ("type", "rope_type"):
        assert scaling_from_dict({key: "linear", "factor": 4}) == wanted
    assert scaling_from_dict({"rope_type": "default"}) is None
    assert scaling_from_dict(None) is None
    dynamic = scaling_from_dict({"type": "dynamic", "factor": 2.0}, max_length=2048)
    assert dynamic == RopeScaling("dynamic_ntk", 2.0, 2048)
    yarn = {"type": "yarn", "factor": 4.0, "original_max_position_embeddings": 2048}
    # Fault B20: the present length does not matter where the original one is given.
    for length in (2048, 8192, 163840):
        found = scaling_from_dict(yarn | {"finetuned": True}, max_length=length)
        assert found == RopeScaling("yarn", 4.0, 2048)
    assert scaling_from_dict(yarn | {"mscale": 0.7}) == RopeScaling("yarn", 4.0, 2048)
    factors = {"short_factor": [1.0] * 4, "long_factor": [2.0] * 4}
    su = scaling_from_dict(
        {"type": "su", **factors}, max_length=131072, original_length=4096
    )
    assert su.kind == "longrope" and su.factor == 32 and su.long_factor == (2.0,) * 4
    newer = {"rope_type": "linear", "factor": 2.0, "rope_theta": 5e5}
    found = rope_from_config({"rope_parameters": newer, "partial_rotary_factor": 0.5})
    assert found == Rope(base=5e5, fraction=0.5, scaling=RopeScaling("linear", 2.0))


LLAMA3 = {
    "rope_type": "llama3",
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 8192,
}


@pytest.mark.parametrize(
    "changes, message",
    [
        ({"rope_type": "lama3"}, "did you mean 'llama3'"),
        ({"type": "yarn"}, "contradict each other"),
        ({"rope_type": None}, "has no 'rope_type'"),
        ({"low_freq_facter": 1.0}, "did you mean 'low_freq_factor'"),
        ({"beta_fast": 32}, "has no key 'beta_fast'"),
        ({"factor": None}, "needs 'factor'"),
        ({"factor": 0.5}, "'factor' must be at least 1"),
        ({"factor": "8"}, "'factor' has the wrong type"),
        ({"high_freq_factor": None}, "needs 'high_freq_factor'"),
        ({"low_freq_factor": 4.0}, "'low_freq_factor' must be"),
        ({"original_max_position_embeddings": None}, "needs 'original_max_position"),
    ],
)
def test_checkpoints_that_make_no_sense_are_refused(changes, message):
    # Fault B23: nothing falls back to plain RoPE in silence.
    with pytest.raises(ValueError, match=message):
        scaling_from_dict(LLAMA3 | changes, max_length=131072)


def test_lengths_beside_and_within_must_agree():
    assert scaling_from_dict(LLAMA3, original_length=8192).original_length == 8192
    with pytest.raises(ValueError, match="8192 in rope_scaling, but 4096 beside it"):
        scaling_from_dict(LLAMA3, original_length=4096)
    np.testing.assert_allclose(inverse_frequencies(8), plain(8))


@pytest.mark.parametrize("kind", FOLLOWING)
def test_a_planned_length_makes_decoding_the_full_pass(kind):
    # Faults B18 and B22 in a model of two layers: original 8, generated to 14.
    scaling = {"kind": kind, "original_length": 8, "length": 14, **FOLLOWING[kind]}
    encoding = make("rope", scaling=scaling)
    assert not encoding.length_dependent and encoding.invariant
    following = make("rope", scaling=scaling | {"length": None}).scaling
    lengths = jnp.asarray([14])
    np.testing.assert_allclose(
        encoding.frequencies(8), following.frequencies(8, length=lengths)[0], rtol=1e-6
    )
    amplitude = np.broadcast_to(following.amplitude(lengths), (1,))
    np.testing.assert_allclose(encoding.scaling.amplitude(), amplitude[0], rtol=1e-6)
    config = ModelConfig(
        vocabulary=7,
        layers=2,
        width=8,
        heads=1,
        head_dim=8,
        feedforward=8,
        position=encoding,
    )
    model = TransformerXL(config, key=jax.random.key(0))
    tokens, at = jnp.arange(14)[None] % 7, where.contiguous(1, 14)
    full, _ = model(tokens, at, model.init_memory(1, 0))
    graphdef, state = nnx.split(model)

    @jax.jit
    def step(tokens, at, cache):
        return nnx.merge(graphdef, state)(tokens, at, cache, spacing="any")

    cache, found = model.init_cache(1, 14), []
    for t in range(14):
        here = jax.tree.map(lambda x, t=t: x[:, t : t + 1], at)
        logits, cache = step(tokens[:, t : t + 1], here, cache)
        found.append(logits)
    np.testing.assert_allclose(jnp.concatenate(found, axis=1), full, atol=1e-4)


def test_a_planned_length_needs_a_kind_that_depends_on_it():
    with pytest.raises(ValueError, match="does not depend on a length"):
        RopeScaling("linear", 2.0, length=8)

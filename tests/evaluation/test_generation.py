"""Generation: equal to the full forward, compiled once, each row as if alone."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from relpos_jax import where
from relpos_jax.evaluation import generation, texts
from relpos_jax.evaluation.generation import generate, prepare
from relpos_jax.evaluation.sampling import SamplingConfig, kept, sample
from relpos_jax.evaluation.surgery import skeleton
from relpos_jax.interop.runs import load_run, save_run
from relpos_jax.models import ModelConfig, TransformerXL
from relpos_jax.positional import make
from tests.conformance import NAMES, encoding_of

VOCABULARY, PREFILL, NEW = 13, 4, 9
GREEDY = SamplingConfig(temperature=0.0)
PROMPTS = [[1, 2, 3], [4, 5, 6, 7, 8, 9, 10], [11]]


@functools.cache
def model_of(position, **changes):
    """Returns `(config, params, full)`; `full(tokens [t])` gives logits `[t v]`."""
    encoding = encoding_of(position) if isinstance(position, str) else position
    config = ModelConfig(
        vocabulary=VOCABULARY,
        layers=2,
        width=24,
        heads=3,
        head_dim=8,
        feedforward=32,
        position=encoding,
        # Larger first values than usual, so that no two choices are nearly alike.
        init_std=0.3,
        **changes,
    )
    model = TransformerXL(config, key=jax.random.key(0))
    _, params = nnx.split(model)

    @functools.partial(jax.jit, static_argnums=2)
    def forward(tokens, at, window):
        chosen = dataclasses.replace(config, window=window)
        model = nnx.merge(skeleton(chosen)[0], params)
        return model(tokens, at, model.init_memory(1, 0))[0][0]

    def full(tokens, window=None, size=20):
        padded = jnp.zeros((1, size), jnp.int32).at[0, : len(tokens)].set(tokens)
        at = where.from_lengths(jnp.array([len(tokens)]), size)
        return np.asarray(forward(padded, at, window))[: len(tokens)]

    return config, params, full


KINDS = {
    "cache": dict(kind="cache", length=20),
    "ring": dict(kind="ring", length=5),
    "segment": dict(kind="segment", length=5),
}


FEW = ("transformer_xl", "rope", "shaw + transformer_xl", "rope_dynamic_ntk")


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(
    "name",
    [n if n in FEW else pytest.param(n, marks=pytest.mark.slow) for n in NAMES],
)
def test_rows_of_a_batch_are_what_full_passes_choose(name, kind):
    if kind == "segment" and encoding_of(name).absolute:
        pytest.skip("absolute embeddings have no memory")
    if kind != "cache" and encoding_of(name).length_dependent:
        pytest.skip("depends on the whole length, which a ring forgets")
    config, params, full = model_of(name)
    window = None if kind == "cache" else 6
    decoder = prepare(config, params, prefill=PREFILL, chunk=4, **KINDS[kind])
    rows = generate(decoder, PROMPTS, NEW, GREEDY)
    for prompt, row in zip(PROMPTS, rows, strict=True):
        # Judge each choice by its own full pass: one program, and no tie is a failure.
        tokens = [*prompt, *row.tokens.tolist()]
        assert len(row.tokens) == NEW and row.stop is None
        for count in range(len(prompt), len(tokens)):
            known = count if encoding_of(name).length_dependent else len(tokens)
            logits = full(jnp.array(tokens[:known]), window)[count - 1]
            assert logits[tokens[count]] > logits.max() - 1e-4


def test_zeros_before_a_text_are_seen_where_the_model_was_trained_with_them():
    config, params, _ = model_of(
        "transformer_xl", memory_length=5, memory_start="zeros", norm="post"
    )
    with pytest.raises(ValueError, match="take kind='segment'"):
        prepare(config, params, kind="ring")
    decoder = prepare(config, params, prefill=PREFILL, chunk=4)
    assert decoder.kind == "segment"
    rows = generate(decoder, PROMPTS, NEW, GREEDY)

    chosen = dataclasses.replace(config, window=6)
    model = nnx.merge(skeleton(chosen)[0], params)

    @jax.jit
    def forward(tokens):
        at = where.contiguous(1, 20)
        return [model(tokens, at, model.init_memory(1, n))[0][0] for n in (5, 0)]

    for prompt, row in zip(PROMPTS, rows, strict=True):
        tokens = [*prompt, *row.tokens.tolist()]
        padded = (
            jnp.zeros((1, 20), jnp.int32).at[0, : len(tokens)].set(jnp.array(tokens))
        )
        logits, without = (np.asarray(x) for x in forward(padded))
        for count in range(len(prompt), len(tokens)):
            here = logits[count - 1]
            assert here[tokens[count]] > here.max() - 1e-4
        assert abs(logits - without)[: len(prompt)].max() > 1e-3  # zeros are attended


def test_two_programs_whatever_the_lengths_and_the_sampling():
    config, params, _ = model_of("transformer_xl")
    decoder = prepare(config, params, length=64, prefill=PREFILL, chunk=4)
    read, extend = generation.programs(decoder.graphdef, decoder.chunk)
    before = read._cache_size(), extend._cache_size()
    for length, new, sampling in [
        (1, 1, GREEDY),
        (4, 7, SamplingConfig(temperature=0.7)),
        (5, 4, SamplingConfig(top_k=3, stop=((1, 2),))),
        (29, 20, SamplingConfig(top_p=0.5, min_new_tokens=3)),
    ]:
        prompts = [list(range(1, 2)) * length, [3]]
        generate(decoder, prompts, new, sampling)
    assert read._cache_size() == before[0] + 1
    assert extend._cache_size() == before[1] + 1


def test_ring_and_segment_memory_choose_the_same_tokens():
    config, params, _ = model_of("transformer_xl", memory_length=5)
    rings, segments = (
        prepare(config, params, kind=kind, prefill=PREFILL, chunk=4)
        for kind in ("auto", "segment")
    )
    assert (rings.kind, rings.length, segments.length) == ("ring", 5, 5)
    sampling = SamplingConfig(temperature=0.5)
    for one, other in zip(
        generate(rings, PROMPTS, 20, sampling, seeds=3),
        generate(segments, PROMPTS, 20, sampling, seeds=3),
        strict=True,
    ):
        np.testing.assert_array_equal(one.tokens, other.tokens)


def test_a_sampled_row_depends_on_its_own_prompt_and_seed_alone():
    config, params, _ = model_of("rope")
    decoder = prepare(config, params, length=32, prefill=PREFILL, chunk=4)
    sampling = SamplingConfig(temperature=2.0, top_k=9, top_p=0.95)
    together = generate(decoder, PROMPTS, 12, sampling, seeds=5)
    for row, prompt in enumerate(PROMPTS):
        alone = generate(decoder, [prompt], 12, sampling, seeds=[5 + row])
        np.testing.assert_array_equal(alone[0].tokens, together[row].tokens)
    other = generate(decoder, PROMPTS, 12, sampling, seeds=50)
    assert any(
        a.tokens.tolist() != b.tokens.tolist()
        for a, b in zip(together, other, strict=True)
    )


def test_what_does_not_fit_is_refused_before_it_runs():
    config, params, _ = model_of("rope")
    decoder = prepare(config, params, kind="cache", length=8, prefill=PREFILL)
    message = "8 slots, but the longest prompt of 6 and 4 new tokens need 10"
    with pytest.raises(ValueError, match=message):
        generate(decoder, [[1] * 6], 4)
    with pytest.raises(ValueError, match="8 slots"):
        generate(decoder, [[1] * 9], 1)
    # Padding in front takes no slot: what fits, fits to the last one.
    for length in range(1, 8):
        assert len(generate(decoder, [[1] * length, [2]], 8 - length)[0].tokens)
    ring = prepare(config, params, kind="ring", length=8, prefill=PREFILL)
    assert len(generate(ring, [[1] * 9], 30)[0].tokens) == 30
    for wrong, message in [
        ([], "there is no prompt"),
        ([[1], []], "prompt 1 has shape"),
        ([[1, VOCABULARY]], "outside the vocabulary of 13"),
    ]:
        with pytest.raises(ValueError, match=message):
            generate(decoder, wrong, 1)
    with pytest.raises(ValueError, match="max_new_tokens must be positive"):
        generate(decoder, [[1]], 0)
    with pytest.raises(ValueError, match="2 seeds for 1 prompts"):
        generate(decoder, [[1]], 1, seeds=[1, 2])
    for options, message in [
        (dict(kind="rings"), "kind must be one of"),
        (dict(kind="ring"), "length must be positive.*how far a ring"),
        (dict(chunk=0), "chunk must be positive"),
    ]:
        with pytest.raises(ValueError, match=message):
            prepare(config, params, **options)
    config, params, _ = model_of("sinusoidal")
    with pytest.raises(ValueError, match="absolute position embeddings"):
        prepare(config, params, kind="segment", length=4)


def test_past_a_learned_table_is_an_error_that_says_so():
    config, params, _ = model_of(make("learned", rows=32))
    decoder = prepare(config, params, kind="ring", length=8, prefill=PREFILL)
    assert len(generate(decoder, [[1, 2]], 30)[0].tokens) == 30
    with pytest.raises(FloatingPointError, match="row 0 are not finite"):
        generate(decoder, [[1, 2]], 40)


def test_stops_end_a_text_and_are_never_shown():
    config, params, _ = model_of("rope")
    decoder = prepare(config, params, length=64, prefill=PREFILL, chunk=4)
    free = generate(decoder, PROMPTS, 24, GREEDY)
    stop = tuple(free[1].tokens[5:8].tolist())
    first = next(
        i for i in range(22) if tuple(free[1].tokens[i : i + 3].tolist()) == stop
    )
    sampling = SamplingConfig(temperature=0.0, stop=(stop, (99, 99)))
    shown = {row: [] for row in range(3)}
    rows = generate(
        decoder, PROMPTS, 24, sampling, on_chunk=lambda row, x: shown[row].extend(x)
    )
    assert rows[1].stop == stop
    np.testing.assert_array_equal(rows[1].tokens, free[1].tokens[:first])
    for row in range(3):
        assert shown[row] == rows[row].tokens.tolist()


@pytest.mark.parametrize("sizes", [(1,) * 8, (3, 3, 2), (8,)])
def test_stops_across_chunks_overlaps_and_a_least_length(sizes):
    def run(tokens, **options):
        row, shown, begin = generation._Row(SamplingConfig(**options)), [], 0
        for size in sizes:
            if row.finished:
                break
            begin += size
            part = np.array(tokens[begin - size : begin], np.int32)
            shown += row.add(part, begin == 8).tolist()
        assert shown == row.tokens.tolist()
        return shown, row.stop

    text = [1, 1, 2, 3, 1, 2, 4, 5]
    assert run(text) == (text, None)
    assert run(text, stop=((1, 2),)) == ([1], (1, 2))
    assert run(text, stop=((1, 2),), min_new_tokens=2) == ([1, 1, 2, 3], (1, 2))
    assert run(text, stop=((2,), (1, 2))) == ([1], (1, 2))  # the longest that ends here
    assert run(text, stop=((1, 2, 4), (3,))) == ([1, 1, 2], (3,))
    assert run(text, stop=((4, 5, 6),)) == (text, None)


def test_top_k_and_top_p_keep_what_their_papers_say():
    logits = np.log(np.array([[0.1, 0.4, 0.2, 0.3], [0.97, 0.01, 0.01, 0.01]]))

    def left(top_k, top_p):
        knobs = SamplingConfig(top_k=top_k, top_p=top_p).knobs()
        found = np.asarray(kept(jnp.asarray(logits, jnp.float32), knobs))
        return [np.flatnonzero(np.isfinite(row)).tolist() for row in found]

    assert left(0, 1.0) == [[0, 1, 2, 3], [0, 1, 2, 3]]
    assert left(2, 1.0)[0] == [1, 3]
    assert left(9, 1.0)[0] == [0, 1, 2, 3]
    assert left(0, 0.5) == [[1, 3], [0]]
    assert left(0, 0.35)[0] == [1]
    assert left(0, 1e-6) == [[1], [0]]
    assert left(3, 0.75)[0] == [1, 3]  # 4/9 and 3/9 of what top-k leaves reach it


def test_samples_follow_the_softmax_at_a_temperature():
    logits = jnp.log(jnp.array([[0.1, 0.6, 0.3]]))
    keys = jax.random.split(jax.random.key(0), 4000)
    many = jnp.broadcast_to(logits, (4000, 3))
    for temperature in (1.0, 0.5, 3.0):
        knobs = SamplingConfig(temperature=temperature).knobs()
        found = np.bincount(np.asarray(sample(keys, many, knobs)), minlength=3) / 4000
        wanted = np.asarray(jax.nn.softmax(logits[0] / temperature))
        np.testing.assert_allclose(found, wanted, atol=0.03)
    greedy = sample(keys[:5], many[:5], SamplingConfig(temperature=0.0).knobs())
    assert greedy.tolist() == [1] * 5
    for options, message in [
        (dict(temperature=-1.0), "temperature must be 0 or more"),
        (dict(top_k=-1), "top_k must be 0"),
        (dict(top_p=0.0), r"top_p must be in \(0, 1\]"),
        (dict(min_new_tokens=-1), "min_new_tokens must be"),
        (dict(stop=((),)), "stop must be sequences"),
    ]:
        with pytest.raises(ValueError, match=message):
            SamplingConfig(**options)


def test_texts_go_out_in_whole_characters_and_stops_come_in_as_typed():
    assert texts.stops(["\\n\\n", "a\\x00", "é"]) == (
        (10, 10),
        (97, 0),
        (0xC3, 0xA9),
    )
    with pytest.raises(ValueError, match="the stop .* escape"):
        texts.stops(["\\x"])
    written = []
    printer = texts.Printer(written.append, "say ")
    for part in ([0x61, 0xE2], [0x82], [0xAC, 0xC3]):
        printer(0, np.array(part))
    printer.close()
    assert written == ["say a", "", "€", "\ufffd\n"]
    assert texts.text_of(np.array([0x61, 0xFF])) == "a\ufffd"


def test_a_run_is_continued_from_its_folder(tmp_path):
    config = ModelConfig(
        vocabulary=256,
        layers=1,
        width=16,
        heads=2,
        head_dim=8,
        feedforward=16,
        position=encoding_of("alibi"),
    )
    model = TransformerXL(config, key=jax.random.key(0))
    params = nnx.as_pure(nnx.split(model)[1])
    save_run(tmp_path / "run", config, params)
    found, _, loaded = load_run(tmp_path / "run")
    wanted, read = (
        generate(prepare(c, p, tokens=9, prefill=4), [[1, 2]], 6, GREEDY)
        for c, p in ((config, params), (found, loaded))
    )
    np.testing.assert_array_equal(wanted[0].tokens, read[0].tokens)

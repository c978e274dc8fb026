import dataclasses
import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from relpos_jax.evaluation import perplexity, windows
from relpos_jax.evaluation.config import PROTOCOLS, EvaluationConfig
from tests.evaluation import languages

ALL = EvaluationConfig(
    multiples=(1, 1.5, 2, 4),
    non_overlapping_tokens=0,
    same_targets_tokens=16,
    sliding_tokens=0,
    memory_tokens=0,
    group_fraction=2,
    stride_fraction=2,
    memory_lanes=3,
    tokens_per_batch=24,
)


def test_uniform_model_has_the_vocabulary_as_perplexity():
    text = np.arange(301) % 256
    result = perplexity.evaluate(languages.uniform(256), text, 8, ALL)
    assert len(result.scores) == 4 * 4
    for score in result.scores:
        assert score.perplexity == pytest.approx(256, rel=1e-6)
        assert score.bits_per_byte == pytest.approx(8, rel=1e-7)
        if score.protocol != "same_targets":
            assert score.tokens == 300


def test_perplexity_is_taken_of_the_totals():
    # 100 tokens at 2.0 nats and 10 at 5.0. The mean of the batches' means gives 33.12,
    # the mean of their perplexities 77.90.
    text = np.array([0] * 101 + [1] * 10)
    model = languages.unigram([2.0, 5.0])
    for tokens in (100, 1000):
        config = dataclasses.replace(
            ALL,
            multiples=(1,),
            protocols=("non_overlapping",),
            tokens_per_batch=tokens,
        )
        (score,) = perplexity.evaluate(model, text, 100, config).scores
        assert score.tokens == 110
        assert score.perplexity == pytest.approx(9.7058, rel=1e-4)


@pytest.mark.parametrize("batch", [1, 4, 8, 16])
def test_the_last_batch_counts_and_padding_does_not(batch):
    # 11 windows of one target; the last costs 100 nats.
    text = np.array([0] * 11 + [1])
    model = languages.unigram([1.0, 100.0])
    config = dataclasses.replace(
        ALL, multiples=(1,), protocols=("non_overlapping",), tokens_per_batch=batch
    )
    (score,) = perplexity.evaluate(model, text, 1, config).scores
    assert score.tokens == 11
    assert score.nll == pytest.approx(110, rel=1e-6)


def test_units():
    assert perplexity.bits_per_byte(0.9, 1) == pytest.approx(1.29843, rel=1e-5)
    assert perplexity.bits_per_byte(7 * math.log(256), 7) == pytest.approx(8)
    # 1200 subwords of 3 nats each, spread over 1000 words.
    assert perplexity.perplexity(3.0 * 1200, 1000) == pytest.approx(36.598, rel=1e-4)
    assert perplexity.perplexity(1e9, 1) == math.inf


def measured(protocol, size=45, train_length=8):
    """Context with which each target was scored, {length: {target: context}}."""
    language, traces = languages.context_counter(size)
    config = dataclasses.replace(ALL, protocols=(protocol,))
    by_window = perplexity.window_scorer(language)
    by_lane = perplexity.memory_scorer(language)
    found = {}
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(perplexity, "window_scorer", lambda _: by_window)
        patch.setattr(perplexity, "memory_scorer", lambda _: by_lane)
        for target in range(1, size):
            marked = language._replace(params=jnp.int32(target))
            text = np.arange(size)
            for score in perplexity.evaluate(marked, text, train_length, config).scores:
                by_target = found.setdefault(score.length, {})
                by_target[target] = round(score.nll, 3)
                assert score.position_nll.sum() == score.nll
                assert score.position_tokens.sum() == score.tokens
    # Params are an argument: each length was traced once, for all of the targets.
    assert len(traces) == len(found) == 4
    return found


def test_chunks_through_the_compiled_code():
    for length, found in measured("non_overlapping").items():
        assert found == {t: (t - 1) % length + 1 for t in found}


def test_sliding_through_the_compiled_code():
    for length, found in measured("sliding").items():
        assert all(found[t] == t for t in range(1, length + 1))
        later = [c for t, c in found.items() if t > length]
        assert min(later) >= length - length // 2 + 1
        assert max(later) <= length


def test_same_targets_through_the_compiled_code():
    by_length = measured("same_targets")
    scored = {
        length: [t for t, c in found.items() if c > 0]
        for length, found in by_length.items()
    }
    assert all(targets == scored[8] for targets in scored.values())
    assert len(scored[8]) == 16 == 4 * 4
    for length, found in by_length.items():
        assert {length - c for c in found.values() if c > 0} == {0, 1, 2, 3}


def test_memory_through_the_compiled_code():
    for length, found in measured("memory").items():
        # Segments of 8 with a memory of the rest, as full as the text allows.
        for target, context in found.items():
            in_segment = (target - 1) % 8 + 1
            before = target - in_segment
            assert context == in_segment + min(before, length - 8)


def test_each_shape_compiles_once_and_protocols_share_it():
    language, traces = languages.context_counter(200)
    text = np.arange(200)
    perplexity.evaluate(language, text, 8, ALL)
    # Four window shapes for three protocols, four memory lengths for the fourth (the
    # first window shape happens to be that of the segments).
    assert sorted(traces) == [(1, 16), (1, 32), (2, 12)] + [(3, 8)] * 5


def test_refused_memory_is_skipped_with_its_reason():
    language = languages.uniform(4)._replace(refusal="absolute positions")
    result = perplexity.evaluate(language, np.arange(99) % 4, 8, ALL)
    assert {score.protocol for score in result.scores} == set(PROTOCOLS) - {"memory"}
    assert dict(result.skipped) == {"memory": "absolute positions"}


def test_two_evaluations_are_bit_equal_and_leave_parameters_alone():
    key = jax.random.key(0)
    model = languages.unigram(jax.random.uniform(key, (7,)) + 2.0)
    text = np.arange(222) % 7
    before = np.array(model.params)
    first = perplexity.evaluate(model, text, 8, ALL).scores
    other = perplexity.evaluate(model, text[::-1], 8, ALL).scores
    again = perplexity.evaluate(model, text, 8, ALL).scores
    assert [s.nll for s in first] == [s.nll for s in again]
    assert len(other) == len(first)
    assert (before == np.array(model.params)).all()


def test_numbers_do_not_depend_on_the_batch():
    model = languages.unigram(np.linspace(2.0, 4.0, 7))
    text = np.arange(222) * 5 % 7
    one, many = (
        perplexity.evaluate(
            model, text, 8, dataclasses.replace(ALL, tokens_per_batch=n, memory_lanes=m)
        )
        for n, m in ((1, 1), (4096, 8))
    )
    for a, b in zip(one.scores, many.scores, strict=True):
        assert a.tokens == b.tokens
        assert a.nll == pytest.approx(b.nll, rel=1e-6)
        assert (a.position_tokens == b.position_tokens).all()


def test_not_finite_padding_does_not_reach_the_sum():
    def apply(params, tokens, at, memory):
        real = at.segment[..., None] > 0
        logits = jnp.where(real, 0.0, jnp.nan)
        return jnp.broadcast_to(logits, (*tokens.shape, 4)), memory

    language = languages.uniform(4)._replace(apply=apply)
    block = windows.fill(
        np.zeros(6, np.int64), windows.non_overlapping(6, 4), slice(0, 3), 3
    )
    sums, counts = perplexity.window_scorer(language)({}, block)
    assert float(sums.sum()) == pytest.approx(5 * math.log(4), rel=1e-6)
    assert int(counts.sum()) == 5


def test_a_short_text_is_refused_before_anything_compiles():
    with pytest.raises(ValueError, match="has 32 tokens.*needs 33"):
        perplexity.evaluate(languages.uniform(4), np.zeros(32, int), 8, ALL)


@pytest.mark.parametrize(
    "field, value",
    [
        ("protocols", ("sliding", "slidng")),
        ("protocols", ()),
        ("multiples", ()),
        ("multiples", (1, 0)),
        ("tokens_per_batch", -1),
        ("same_targets_tokens", 0),
        ("stride_fraction", 0),
    ],
)
def test_wrong_settings_are_refused_by_name(field, value):
    with pytest.raises(ValueError, match=f"evaluation.{field}"):
        EvaluationConfig(**{field: value})


def test_lengths_are_rounded_sorted_and_unique():
    config = EvaluationConfig(multiples=(2, 1, 1.25, 1.26))
    assert config.lengths(10) == (10, 12, 13, 20)
    assert config.needed(10) == 21


def test_shorter_contexts_are_read_off_the_longest_windows():
    text = np.arange(65) % 7
    model = languages.unigram(np.arange(1.0, 8.0).tolist())
    config = dataclasses.replace(
        ALL, multiples=(4,), protocols=("non_overlapping",), non_overlapping_tokens=0
    )
    (whole,) = perplexity.evaluate(model, text, 4, config).scores
    assert whole.first(16).nll == whole.nll
    begun = whole.first(4)
    # The targets behind the first four tokens of each window of sixteen.
    targets = np.concatenate([text[s + 1 : s + 5] for s in range(0, 64, 16)])
    assert (begun.length, begun.tokens) == (4, 16)
    assert begun.nll == pytest.approx(float((targets + 1).sum()), rel=1e-6)
    for length in (0, 17):
        with pytest.raises(ValueError, match="no first"):
            whole.first(length)

"""Masked tokens and corrupted spans: fractions, purity, and nothing lost."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from relpos_jax.data.batches import Lanes, Windows
from relpos_jax.data.masking import Masked, Masking, corrupt_spans, mask_tokens

TEXT = np.arange(5000) % 200


def test_fractions_and_fates_are_bert_s():
    masking = Masking(mask_id=200)
    tokens, real = np.tile(TEXT, (40, 1)), np.ones((40, 5000), bool)
    real[:, :1000] = False
    inputs, weight = mask_tokens(masking, np.random.default_rng(0), tokens, real)
    chosen = weight > 0
    assert not chosen[:, :1000].any()
    np.testing.assert_array_equal(inputs[~chosen], tokens[~chosen])
    assert chosen[:, 1000:].mean() == pytest.approx(0.15, abs=0.005)
    hidden = (inputs == 200)[chosen].mean()
    same = (inputs == tokens)[chosen].mean()
    assert hidden == pytest.approx(0.8, abs=0.01)
    # A tenth stays, and of the tenth that is drawn anew one in 200 is what it was.
    assert same == pytest.approx(0.1 + 0.1 / 200, abs=0.01)
    assert inputs.max() == 200 and inputs.min() == 0


def test_everything_can_be_hidden():
    masking = Masking(mask_id=9, fraction=1.0, hidden=1.0, replaced=0.0)
    tokens = np.arange(8)[None]
    inputs, weight = mask_tokens(
        masking, np.random.default_rng(0), tokens, np.ones((1, 8), bool)
    )
    assert (inputs == 9).all() and (weight == 1).all()


def test_batches_are_pure_functions_of_seed_step_and_row():
    text = Windows(TEXT, batch_size=4, length=50, seed=3)
    masked = Masked(text, Masking(mask_id=200), seed=1)
    batch = masked.batch(7)
    np.testing.assert_array_equal(batch.targets, text.batch(7).inputs)
    np.testing.assert_array_equal(batch.inputs, masked.batch(7).inputs)
    assert (batch.inputs != masked.batch(8).inputs).any()
    other = Masked(text, Masking(mask_id=200), seed=2).batch(7)
    assert (other.weight != batch.weight).any()
    np.testing.assert_array_equal(other.targets, batch.targets)
    # Rows are masked alike, whoever reads them.
    shares = [masked.sharded(i, 2).batch(7) for i in range(2)]
    together = np.concatenate([share.inputs for share in shares])
    np.testing.assert_array_equal(together, batch.inputs)
    stack = masked.stack(6, 3)
    np.testing.assert_array_equal(stack.inputs[1], batch.inputs)
    np.testing.assert_array_equal(stack.at.position[1], batch.at.position)
    assert masked.steps_per_epoch == text.steps_per_epoch
    assert masked.tokens_per_step == 200


def test_what_makes_no_sense_is_refused():
    for wrong in (dict(fraction=0.0), dict(hidden=0.9, replaced=0.2), dict(mask_id=0)):
        with pytest.raises(ValueError, match=next(iter(wrong))):
            Masking(**{"mask_id": 5, **wrong})
    masked = Masked(Lanes(TEXT, 2, 10), Masking(mask_id=200), seed=0)
    with pytest.raises(ValueError, match="count must be at least 1"):
        masked.stack(0, 0)
    with pytest.raises(ValueError, match="no room"):
        corrupt_spans(np.random.default_rng(0), TEXT[:1], sentinel=300)


@settings(deadline=None, max_examples=50)
@given(st.integers(2, 60), st.integers(0, 5), st.sampled_from([0.15, 0.5]))
def test_spans_put_back_are_the_text(length, seed, fraction):
    tokens = TEXT[:length]
    inputs, targets = corrupt_spans(
        np.random.default_rng(seed), tokens, sentinel=299, fraction=fraction
    )
    holes, mark = {}, None
    for token in targets:
        if token >= 200:
            mark = int(token)
            holes[mark] = []
        else:
            holes[mark].append(token)
    assert list(holes) == [299 - i for i in range(len(holes))]
    assert all(holes.values())
    restored = []
    for token in inputs:
        restored += holes[int(token)] if token >= 200 else [token]
    np.testing.assert_array_equal(restored, tokens)
    taken = min(max(round(length * fraction), 1), length - 1)
    assert len(targets) == taken + len(holes)
    assert len(inputs) == length - taken + len(holes)

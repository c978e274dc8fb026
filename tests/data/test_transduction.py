"""Tasks from sequence to sequence: right answers, and draws that depend on the row."""

import numpy as np
import pytest

from relpos_jax.data.transduction import (
    FIRST,
    PLUS,
    START,
    STOP,
    VOCABULARY,
    Transductions,
)


def rows(task, shortest=1, longest=6, batch=20):
    pairs = Transductions(task, batch, shortest, longest, seed=1).batch(3)
    for row in range(batch):
        source = pairs.source[row][pairs.source_at.segment[row] != 0] - FIRST
        target = pairs.targets[row][pairs.weight[row] > 0]
        assert target[-1] == STOP and pairs.inputs[row, 0] == START
        real = pairs.at.segment[row] != 0
        np.testing.assert_array_equal(real, pairs.weight[row] > 0)
        np.testing.assert_array_equal(pairs.inputs[row][real][1:], target[:-1])
        np.testing.assert_array_equal(
            pairs.at.position[row][real], np.arange(real.sum())
        )
        yield source, target[:-1] - FIRST
    assert pairs.source.max() < VOCABULARY


def test_answers_are_right():
    for source, target in rows("copy"):
        np.testing.assert_array_equal(target, source)
    for source, target in rows("reverse"):
        np.testing.assert_array_equal(target[::-1], source)
    sizes = set()
    for source, target in rows("addition"):
        (plus,) = np.flatnonzero(source == PLUS)
        one, other, total = (
            sum(int(digit) * 10**i for i, digit in enumerate(digits))
            for digits in (source[:plus], source[plus + 1 :], target)
        )
        assert one + other == total and len(target) == plus + 1
        sizes.add(plus)
    assert sizes == {1, 2, 3, 4, 5, 6}


def test_batches_are_pure_functions_of_seed_step_and_row():
    one = Transductions("copy", 4, 2, 5, seed=0)
    again, larger = one.batch(7), Transductions("copy", 8, 2, 5, seed=0).batch(7)
    np.testing.assert_array_equal(one.batch(7).source, again.source)
    np.testing.assert_array_equal(larger.source[:4], again.source)
    assert (one.batch(8).source != again.source).any()
    np.testing.assert_array_equal(one.stack(6, 2).targets[1], again.targets)


def test_what_makes_no_sense_is_refused():
    with pytest.raises(ValueError, match="task must be one of"):
        Transductions("sort", 4, 1, 5, seed=0)
    with pytest.raises(ValueError, match="shortest <= longest"):
        Transductions("copy", 4, 6, 5, seed=0)

import numpy as np
import pytest

from relpos_jax.evaluation import windows


def contexts(size, plan):
    """Target -> tokens it sees, for each target that a plan scores."""
    found = {}
    for start, first, stop in zip(plan.start, plan.first, plan.stop, strict=True):
        for position in range(first, stop):
            target = start + position + 1
            assert target not in found, f"target {target} is scored twice"
            assert 1 <= target < size
            found[target] = position + 1
    return found


# The common scheme scores 6, 9 and 6 of these.
@pytest.mark.parametrize(
    "size, length, stride, tokens", [(8, 4, 4, 7), (10, 4, 2, 9), (9, 4, 4, 8)]
)
def test_strided_windows_score_every_target(size, length, stride, tokens):
    plan = windows.sliding(size, length, stride)
    assert plan.tokens == tokens
    assert sorted(contexts(size, plan)) == list(range(1, size))


@pytest.mark.parametrize("length", [1, 2, 5, 8, 40])
@pytest.mark.parametrize("size", [2, 3, 8, 9, 17])
def test_sliding_scores_once_with_the_promised_context(size, length):
    for stride in range(1, length + 1):
        found = contexts(size, windows.sliding(size, length, stride))
        assert sorted(found) == list(range(1, size))
        later = {t: c for t, c in found.items() if t > length}
        assert all(length - stride + 1 <= c <= length for c in later.values())
        assert all(found[t] == t for t in found if t <= length)


@pytest.mark.parametrize("size, length", [(2, 4), (4, 4), (5, 4), (6, 4), (9, 1)])
def test_chunks_score_the_tail(size, length):
    plan = windows.non_overlapping(size, length)
    found = contexts(size, plan)
    assert sorted(found) == list(range(1, size))
    assert all(c == (t - 1) % length + 1 for t, c in found.items())


def test_same_targets_are_the_same_at_every_length():
    size, longest, group = 501, 64, 4
    plans = [
        windows.same_targets(size, length, longest, group, 50)
        for length in (4, 5, 16, 64)
    ]
    targets = [sorted(contexts(size, plan)) for plan in plans]
    assert all(t == targets[0] for t in targets)
    assert len(targets[0]) == 50 * group
    assert targets[0][-1] == size - 1
    for plan in plans:
        found = contexts(size, plan).values()
        assert min(found) == plan.length - group + 1
        assert max(found) == plan.length


@pytest.mark.parametrize("size", [65, 66, 68, 69, 80])
def test_same_targets_never_overlap_in_a_short_text(size):
    plan = windows.same_targets(size, 8, 64, 4, 1000)
    contexts(size, plan)
    assert plan.start.min() >= 0


@pytest.mark.parametrize("count", [1, 2, 3, 8])
@pytest.mark.parametrize("size", [2, 9, 10, 33, 34])
@pytest.mark.parametrize("warm_up", [0, 3, 4, 12])
def test_lanes_score_once_and_read_what_comes_before(size, count, warm_up):
    text = np.arange(size) + 100
    block, segments = windows.lanes(text, 4, warm_up, count)
    assert block.inputs.shape[0] <= count
    assert block.inputs.shape[1] == segments * 4
    assert sorted(block.targets[block.weights]) == list(range(101, 100 + size))
    real = block.segment > 0
    assert (block.targets - block.inputs)[real].tolist() == [1] * real.sum()
    for row, scored in zip(block.inputs * real, block.weights, strict=True):
        if scored.any():
            first = int(scored.argmax())
            before = row[:first][row[:first] > 0]
            assert len(before) >= min(warm_up, row[first] - 100)


def test_filled_rows_hold_tokens_targets_and_padding():
    text = np.arange(10, 17)
    plan = windows.non_overlapping(len(text), 4)
    block = windows.fill(text, plan, slice(0, 3), 3)
    assert block.inputs.tolist() == [[10, 11, 12, 13], [14, 15, 0, 0], [0] * 4]
    assert block.targets.tolist() == [[11, 12, 13, 14], [15, 16, 0, 0], [0] * 4]
    assert block.segment.tolist() == [[1] * 4, [1, 1, 0, 0], [0] * 4]
    assert block.weights.tolist() == (block.segment > 0).tolist()


@pytest.mark.parametrize(
    "call, words",
    [
        (lambda: windows.sliding(9, 4, 5), "stride is 5"),
        (lambda: windows.sliding(9, 4, 0), "stride is 0"),
        (lambda: windows.non_overlapping(1, 4), "has 1 tokens"),
        (lambda: windows.non_overlapping(0, 4), "has 0 tokens"),
        (lambda: windows.non_overlapping(9, 0), "length is 0"),
        (lambda: windows.same_targets(64, 8, 64, 4, 9), "needs 65"),
        (lambda: windows.same_targets(99, 8, 64, 9, 9), "group 9"),
        (lambda: windows.same_targets(99, 8, 4, 4, 9), "longest 4"),
        (lambda: windows.same_targets(99, 8, 64, 4, 0), "count is 0"),
        (lambda: windows.lanes(np.arange(9), 4, 0, 0), "0 lanes"),
        (lambda: windows.lanes(np.arange(9), 4, -1, 1), "warm-up of -1"),
    ],
)
def test_impossible_windows_are_refused(call, words):
    with pytest.raises(ValueError, match=words):
        call()

import grain
import hypothesis
import hypothesis.strategies as st
import jax
import numpy as np
import pytest

from relpos_jax.data import Batch, Lanes, Windows

# Tokens that say where they stand, so that a batch shows where it was read.
STREAM = np.arange(100)


def starts(batches: Windows, count: int) -> list[int]:
    """First tokens of the first `count` windows, in order."""
    steps = -(-count // batches.batch_size)
    return batches.stack(0, steps).inputs[..., 0].ravel()[:count].tolist()


def epoch_starts(batches: Windows, epoch: int) -> list[int]:
    count = batches.windows_per_epoch
    return starts(batches, (epoch + 1) * count)[epoch * count :]


@pytest.mark.parametrize("kind", [Lanes, lambda *a: Windows(*a, seed=3)])
def test_shapes_and_the_one_shift(kind):
    batches = kind(STREAM.astype(np.uint8), 4, 5)
    batch = batches.batch(7)
    for array in (batch.inputs, batch.targets, *batch.at):
        assert (array.shape, array.dtype) == ((4, 5), np.int32)
    assert (batch.weight.shape, batch.weight.dtype) == ((4, 5), np.float32)
    np.testing.assert_array_equal(batch.targets, batch.inputs + 1)
    np.testing.assert_array_equal(np.diff(batch.at.position), 1)
    assert (batch.weight == 1).all()
    assert batches.tokens_per_step == 20


@pytest.mark.parametrize("kind", [Lanes, lambda *a: Windows(*a, seed=3)])
def test_a_stack_is_the_batches_one_by_one(kind):
    batches = kind(STREAM, 3, 4)
    stack = batches.stack(5, 8)
    assert isinstance(stack, Batch)
    for index in range(8):
        one = batches.batch(5 + index)
        jax.tree.map(np.testing.assert_array_equal, one, jax.tree.map(
            lambda array: array[index], stack
        ))  # fmt: skip


def test_lanes_continue_over_steps():
    lanes = Lanes(STREAM, 3, 4)
    assert lanes.steps_per_epoch == 99 // 12
    steps = lanes.stack(0, lanes.steps_per_epoch)
    # [s b t] to one row a lane: each is a piece of the stream without a gap.
    rows = steps.inputs.transpose(1, 0, 2).reshape(3, -1)
    np.testing.assert_array_equal(rows, np.arange(96).reshape(3, 32))
    np.testing.assert_array_equal(steps.targets[:-1, :, -1], steps.inputs[1:, :, 0])
    positions = steps.at.position.transpose(1, 0, 2).reshape(3, -1)
    np.testing.assert_array_equal(positions, np.tile(np.arange(32), (3, 1)))
    assert (steps.at.segment == 1).all()


def test_lanes_start_afresh_at_the_epoch():
    lanes = Lanes(STREAM, 3, 4)
    last, first = lanes.batch(7), lanes.batch(8)
    np.testing.assert_array_equal(first.inputs, lanes.batch(0).inputs)
    np.testing.assert_array_equal(first.at.position, lanes.batch(0).at.position)
    assert (last.at.segment == 1).all()
    assert (first.at.segment == 2).all()


def test_lanes_leave_out_less_than_a_step():
    for count in range(13, 60):
        lanes = Lanes(np.arange(count), 3, 4)
        seen = lanes.stack(0, lanes.steps_per_epoch).targets
        assert 0 <= count - 1 - seen.max() < 12
        assert np.unique(seen).size == seen.size


def test_an_epoch_of_windows_has_each_once_and_none_overlap():
    windows = Windows(STREAM, 4, 7, seed=0)
    for epoch in range(6):
        found = sorted(epoch_starts(windows, epoch))
        assert len(found) == windows.windows_per_epoch == 13
        np.testing.assert_array_equal(np.diff(found), 7)
        assert 0 <= found[0] < 7
        assert found[-1] + 7 < STREAM.size


def test_windows_of_an_epoch_are_a_function_of_seed_and_epoch():
    windows = Windows(STREAM, 13, 7, seed=5)
    orders = [epoch_starts(windows, epoch) for epoch in range(4)]
    assert len({tuple(order) for order in orders}) == 4
    # A new object, asked for epoch 2 first (here a batch is an epoch).
    again = Windows(STREAM, 13, 7, seed=5).batch(2).inputs[:, 0].tolist()
    assert again == orders[2]
    # The next seed's epochs are not this seed's, one later.
    other = Windows(STREAM, 13, 7, seed=6)
    assert epoch_starts(other, 0) not in orders
    # Neither sorted nor the same order moved by another offset.
    ranks = [np.argsort(np.argsort(order)).tolist() for order in orders]
    assert list(range(13)) not in ranks
    assert len(set(map(tuple, ranks))) == 4


def test_borders_of_windows_vary_between_epochs():
    windows = Windows(np.arange(1000), 141, 7, seed=1)
    assert windows.windows_per_epoch == windows.batch_size
    offsets = {windows.batch(epoch).inputs.min() for epoch in range(40)}
    assert offsets == set(range(7))


def test_no_window_is_dropped_where_an_epoch_ends_within_a_batch():
    ragged, whole = Windows(STREAM, 4, 7, seed=2), Windows(STREAM, 13, 7, seed=2)
    assert ragged.windows_per_epoch % ragged.batch_size
    assert starts(ragged, 52) == starts(whole, 52)
    assert (ragged.steps_per_epoch, whole.steps_per_epoch) == (4, 1)


def test_more_rows_than_windows():
    windows = Windows(np.arange(20), 8, 6, seed=2)
    assert windows.windows_per_epoch == 2
    found = windows.batch(0).inputs[:, 0].reshape(4, 2)
    np.testing.assert_array_equal(abs(np.diff(found)), 6)


def test_one_more_token_than_the_length_is_one_window():
    batch = Windows(np.arange(9), 1, 8, seed=0).batch(3)
    np.testing.assert_array_equal(batch.inputs, np.arange(8)[None])
    np.testing.assert_array_equal(batch.targets, np.arange(1, 9)[None])
    batch = Lanes(np.arange(17), 2, 8).batch(3)
    np.testing.assert_array_equal(batch.inputs, np.arange(16).reshape(2, 8))


@pytest.mark.parametrize("found", [0, 1, 8])
def test_too_few_tokens_say_found_and_needed(found):
    with pytest.raises(ValueError, match=f"Windows.* at least 9, found {found}"):
        Windows(np.arange(found), 4, 8, seed=0)
    with pytest.raises(ValueError, match=f"Lanes.* at least 33, found {found}"):
        Lanes(np.arange(found), 4, 8)


@pytest.mark.parametrize("processes", [1, 2, 3])
@pytest.mark.parametrize("kind", [Lanes, lambda *a: Windows(*a, seed=4)])
def test_processes_share_the_rows(kind, processes):
    batches = kind(STREAM, 6, 4)
    parts = [batches.sharded(index, processes) for index in range(processes)]
    for step in range(12):
        whole = batches.batch(step)
        rows = [part.batch(step) for part in parts]
        together = jax.tree.map(lambda *arrays: np.concatenate(arrays), *rows)
        jax.tree.map(np.testing.assert_array_equal, together, whole)
    assert {part.steps_per_epoch for part in parts} == {batches.steps_per_epoch}
    assert {part.tokens_per_step for part in parts} == {24}


def test_what_cannot_be_dealt_is_refused():
    lanes = Lanes(STREAM, 6, 4)
    with pytest.raises(ValueError, match="6 rows cannot be dealt evenly to 4"):
        lanes.sharded(0, 4)
    with pytest.raises(ValueError, match="process_index"):
        lanes.sharded(2, 2)


def test_unusable_arguments_are_refused():
    with pytest.raises(ValueError, match="integers along one axis, got float64"):
        Lanes(STREAM.astype(float), 2, 4)
    with pytest.raises(ValueError, match=r"got int64 of shape \(10, 10\)"):
        Lanes(STREAM.reshape(10, 10), 2, 4)
    with pytest.raises(ValueError, match="length must be at least 1, got 0"):
        Lanes(STREAM, 2, 0)
    with pytest.raises(ValueError, match="batch_size must be at least 1, got -1"):
        Windows(STREAM, -1, 4, seed=0)
    with pytest.raises(ValueError, match="seed must not be negative"):
        Windows(STREAM, 2, 4, seed=-1)
    for batches in (Lanes(STREAM, 2, 4), Windows(STREAM, 2, 4, seed=0)):
        with pytest.raises(ValueError, match="step must not be negative, got -1"):
            batches.batch(-1)
        with pytest.raises(ValueError, match="count must be at least 1"):
            batches.stack(0, 0)


def test_wide_ids_are_kept(tmp_path):
    ids = np.array([0, 32767, 32768, 65535, 65536, 70000, 267734] * 4, np.uint32)
    batch = Lanes(ids, 1, 6).batch(0)
    np.testing.assert_array_equal(batch.inputs[0], ids[:6])
    np.testing.assert_array_equal(batch.targets[0], ids[1:7])


@pytest.mark.parametrize("kind", [Lanes, lambda *a: Windows(*a, seed=4)])
def test_a_memory_map_is_read_in_slices(tmp_path, kind):
    path = tmp_path / "tokens"
    STREAM.astype(np.uint8).tofile(path)
    mapped = kind(np.memmap(path, np.uint8, "r"), 4, 5)
    assert isinstance(mapped.tokens, np.memmap)
    batch = mapped.batch(9)
    jax.tree.map(np.testing.assert_array_equal, batch, kind(STREAM, 4, 5).batch(9))
    assert not isinstance(batch.inputs, np.memmap)


@pytest.mark.parametrize("kind", [Lanes, lambda *a, **k: Windows(*a, seed=4, **k)])
@hypothesis.settings(max_examples=25, deadline=None)
@hypothesis.given(
    rows=st.integers(1, 4),
    processes=st.integers(1, 4),
    length=st.integers(1, 7),
    size=st.integers(40, 130),
    step=st.integers(0, 30),
    starts=st.sets(st.integers(0, 39)),
)
def test_processes_read_each_row_once(
    kind, rows, processes, length, size, step, starts
):
    """What all processes read together is the global batch: none shared, none lost."""
    tokens = np.arange(size, dtype=np.uint8)
    batch = rows * processes
    if size < batch * length + 1:
        return
    documents = np.array(sorted(starts), np.int64)
    whole = kind(tokens, batch, length, documents=documents)
    parts = [whole.sharded(index, processes) for index in range(processes)]
    read = [part.batch(step) for part in parts]
    assert all(part.inputs.shape == (rows, length) for part in read)
    together = jax.tree.map(lambda *arrays: np.concatenate(arrays), *read)
    jax.tree.map(np.testing.assert_array_equal, together, whole.batch(step))
    assert len({part.steps_per_epoch for part in parts}) == 1
    if isinstance(whole, Lanes):  # in an epoch each token is read once, by one process
        steps = whole.steps_per_epoch
        seen = np.concatenate([p.stack(0, steps).targets.ravel() for p in parts])
        np.testing.assert_array_equal(np.sort(seen), np.arange(1, seen.size + 1))
        assert 0 <= size - 1 - seen.size < batch * length


def test_documents_have_segments_of_their_own():
    documents = np.array([0, 5, 6, 20, 50])
    lanes = Lanes(STREAM, 3, 4, documents=documents)
    steps = lanes.stack(0, 2 * lanes.steps_per_epoch)
    # By token and epoch, whatever row or step it is read in.
    inputs, segments = steps.inputs.reshape(2, -1), steps.at.segment.reshape(2, -1)
    for epoch in range(2):
        expected = np.array([(documents <= i).sum() for i in inputs[epoch]])
        np.testing.assert_array_equal(segments[epoch], 1 + 6 * epoch + expected)
    # A document's first token follows from nothing, so it has no weight.
    no_weight = np.unique(steps.targets[steps.weight == 0])
    assert no_weight.tolist() == [5, 6, 20, 50]
    plain = Lanes(STREAM, 3, 4).stack(0, lanes.steps_per_epoch)
    np.testing.assert_array_equal(
        plain.at.position, steps.at.position[: lanes.steps_per_epoch]
    )
    assert (plain.weight == 1).all()


def test_windows_keep_documents_apart():
    windows = Windows(STREAM, 4, 7, seed=3, documents=np.array([0, 10, 11, 60]))
    batch = windows.batch(5)
    same = batch.at.segment[:, :1] == batch.at.segment
    first = np.array([0, 10, 11, 60])
    document = np.searchsorted(first, batch.inputs, side="right")
    np.testing.assert_array_equal(same, document == document[:, :1])
    assert (batch.at.segment > 0).all()


def test_segment_ids_stay_positive_after_many_epochs():
    lanes = Lanes(STREAM, 3, 4, documents=np.arange(100))
    step = 10**9 * lanes.steps_per_epoch
    batch = lanes.batch(step)
    assert batch.at.segment.dtype == np.int32
    assert (batch.at.segment > 0).all()
    assert np.unique(batch.at.segment).size == batch.at.segment.size


def test_documents_outside_the_text_are_refused():
    for starts in ([-1], [0, 100], [5, 3]):
        with pytest.raises(ValueError, match="documents must be places in the 100"):
            Lanes(STREAM, 3, 4, documents=np.array(starts))


def test_grain_reads_ahead_and_its_state_is_a_number():
    """Batches are a map of the step, which is all that Grain needs."""
    batches = Windows(STREAM, 4, 7, seed=3)
    steps = grain.MapDataset.range(20).map(batches.batch)
    ahead = grain.ReadOptions(num_threads=1, prefetch_buffer_size=2)
    read = iter(steps.to_iter_dataset(ahead))
    for step in range(5):
        found = next(read)
        jax.tree.map(np.testing.assert_array_equal, found, batches.batch(step))
    state = read.get_state()
    again = iter(steps.to_iter_dataset(ahead))
    again.set_state(state)
    jax.tree.map(np.testing.assert_array_equal, next(again), batches.batch(5))

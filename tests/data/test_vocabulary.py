import numpy as np
import pytest

from relpos_jax.data import Bytes


def test_bytes_not_characters():
    vocabulary = Bytes()
    ids = vocabulary.encode("aé\n€")
    assert ids.tolist() == [97, 195, 169, 10, 226, 130, 172]
    assert ids.dtype == np.int32
    assert vocabulary.decode(ids).decode() == "aé\n€"
    assert (vocabulary.size, vocabulary.name) == (256, "bytes")


def test_every_byte_comes_back():
    every = bytes(range(256))
    ids = Bytes().encode(every)
    assert ids.tolist() == list(range(256))
    assert Bytes().decode(ids) == every
    assert Bytes().decode(Bytes().encode("")) == b""


@pytest.mark.parametrize("wrong", [-1, 256, 70_000])
def test_ids_outside_are_refused_and_named(wrong):
    with pytest.raises(ValueError, match=f"id {wrong} at index 2 is no byte"):
        Bytes().decode(np.array([0, 255, wrong, wrong]))

import dataclasses
import json

import numpy as np
import pytest

from relpos_jax.data import Words, store
from relpos_jax.data.text_files import Record

SIZE = 267_735
IDS = [0, 32767, 32768, 65535, 65536, 70000, 267734]


@dataclasses.dataclass(frozen=True)
class Numbers:
    """Ids are written out in the text."""

    size: int
    unit = "subword"
    name = "numbers"

    def encode(self, text):
        return np.array([int(word) for word in text.split()], np.int32)

    def decode(self, ids):
        return " ".join(map(str, ids)).encode()

    def state(self):
        return {"kind": "characters", "alphabet": "0123456789", "size": self.size}


def write(folder, vocabulary, *texts):
    parts = {"train": lambda: iter([Record(text, True) for text in texts])}
    store.write(folder, parts, vocabulary, {"of": "a test"})
    return store.read(folder, vocabulary)["train"]


def test_ids_take_as_few_bytes_as_they_need_and_come_back(tmp_path):
    kinds = {2: "u1", 256: "u1", 257: "u2", 65536: "u2", 65537: "u4", SIZE: "u4"}
    for size, kind in kinds.items():
        assert store.dtype_for(size) == np.dtype(f"<{kind}")
        ids = [i for i in IDS if i < size] + [size - 1]
        text = " ".join(map(str, ids)).encode()
        part = write(tmp_path / str(size), Numbers(size), text)
        assert part.tokens.dtype == np.dtype(f"<{kind}")
        assert part.tokens.tolist() == ids
        assert isinstance(part.tokens, np.memmap)
        assert part.bytes == len(text)


def test_documents_begin_where_their_records_do(tmp_path):
    vocabulary = Words(("<eos>", "<unk>", "a"))
    records = [Record(b"a a\n", True), Record(b"a\n", False), Record(b"a", True)]
    store.write(tmp_path / "x", {"train": lambda: iter(records)}, vocabulary, {})
    part = store.read(tmp_path / "x", vocabulary)["train"]
    # The last line ends too, though its text doesn't say so.
    assert part.tokens.tolist() == [2, 2, 0, 2, 0, 2, 0]
    assert part.documents.tolist() == [0, 5]
    assert part.bytes == 7


def test_damaged_files_are_named(tmp_path):
    part = write(tmp_path / "x", Numbers(SIZE), b"1 2 3", b"4")
    path = tmp_path / "x" / "train.tokens"
    whole = path.read_bytes()
    path.write_bytes(whole[:-1])
    with pytest.raises(ValueError, match="train.tokens has 15 bytes: expected the 16"):
        store.read(tmp_path / "x", Numbers(SIZE))
    path.unlink()
    with pytest.raises(ValueError, match="train.tokens is absent"):
        store.read(tmp_path / "x", Numbers(SIZE))
    path.write_bytes(whole)
    assert store.read(tmp_path / "x", Numbers(SIZE))["train"].sha256 == part.sha256
    with pytest.raises(ValueError, match="tokens of another vocabulary"):
        store.read(tmp_path / "x", Numbers(SIZE - 1))
    info = json.loads((tmp_path / "x" / "info.json").read_text())
    info["parts"]["train"]["dtype"] = "<u2"
    (tmp_path / "x" / "info.json").write_text(json.dumps(info))
    with pytest.raises(ValueError, match="type uint16, its vocabulary of 267735"):
        store.read(tmp_path / "x", Numbers(SIZE))


def test_what_cannot_be_encoded_leaves_nothing_behind(tmp_path):
    with pytest.raises(ValueError, match="'train', after 3 bytes: invalid literal"):
        write(tmp_path / "x", Numbers(SIZE), b"1 2", b"three")
    assert list(tmp_path.iterdir()) == []


def test_who_comes_second_takes_what_is_there(tmp_path):
    first = write(tmp_path / "x", Numbers(SIZE), b"1 2 3")
    second = write(tmp_path / "x", Numbers(SIZE), b"4 5 6")
    assert second.tokens.tolist() == first.tokens.tolist() == [1, 2, 3]
    assert [p.name for p in tmp_path.iterdir()] == ["x"]


def test_an_empty_part_is_read(tmp_path):
    assert write(tmp_path / "x", Numbers(SIZE)).tokens.size == 0


def test_the_digest_of_a_map_is_that_of_its_bytes(tmp_path, monkeypatch):
    import hashlib

    monkeypatch.setattr(store, "_BLOCK", 64)
    data = np.arange(1000, dtype="<u4")
    data.tofile(tmp_path / "data")
    mapped = np.memmap(tmp_path / "data", "<u4", "r")
    expected = hashlib.sha256(data.tobytes()).hexdigest()
    assert store.sha256(mapped[:300], mapped[300:]) == store.sha256(data) == expected

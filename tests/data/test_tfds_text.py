import importlib
import socket
import threading
import time

import numpy as np
import pytest
import tensorflow_datasets as tfds

from relpos_jax.data import corpora, tfds_text, tokens

DOCUMENTS = {
    "train": [f"document {number}, é\nits end" for number in range(2500)],
    "validation": ["held out", "for the choices"],
    "test": ["held out for the last word"],
}


class RelposNotes(tfds.core.GeneratorBasedBuilder):
    """A set of our own with three splits and a second text feature."""

    VERSION = tfds.core.Version("1.0.0")
    SPLITS = ("train", "validation", "test")

    def _info(self):
        features = {"title": tfds.features.Text(), "text": tfds.features.Text()}
        features = tfds.features.FeaturesDict(features)
        return tfds.core.DatasetInfo(builder=self, features=features)

    def _split_generators(self, dl_manager):
        return {split: self._generate_examples(split) for split in self.SPLITS}

    def _generate_examples(self, split):
        for number, text in enumerate(DOCUMENTS[split]):
            yield number, {"title": f"title {number}", "text": text}


class RelposOneSplit(RelposNotes):
    """Its one split is `train`."""

    VERSION = tfds.core.Version("1.0.0")
    SPLITS = ("train",)


class RelposNoTrain(RelposNotes):
    """It has no split `train`."""

    VERSION = tfds.core.Version("1.0.0")
    SPLITS = ("test",)


class RelposFails(RelposNotes):
    """Its preparation needs what is not there."""

    VERSION = tfds.core.Version("1.0.0")

    def _split_generators(self, dl_manager):
        importlib.import_module("a_module_that_nobody_has")


class RelposNumbers(tfds.core.GeneratorBasedBuilder):
    """A set without text."""

    VERSION = tfds.core.Version("1.0.0")

    def _info(self):
        features = tfds.features.FeaturesDict({"label": tfds.features.Scalar(np.int64)})
        return tfds.core.DatasetInfo(builder=self, features=features)

    def _split_generators(self, dl_manager):
        return {"train": self._generate_examples()}

    def _generate_examples(self):
        yield 0, {"label": 1}


@pytest.fixture
def reachable(monkeypatch):
    """Sets that need no download are prepared without asking the network."""
    monkeypatch.setattr(tfds_text, "_connect", lambda host, port: None)


def test_splits_are_the_authors(tmp_path, reachable):
    corpus = corpora.load("tfds:relpos_notes", data_dir=tmp_path)
    lines = corpus.train.tobytes().decode().split("its end")
    # TFDS shuffles what it stores, by a fixed rule.
    assert len(lines) == 2501
    assert set(lines[0].split()) == {"document", lines[0].split()[1], "é"}
    numbers = sorted(
        int(line.split("document ")[1].split(",")[0]) for line in lines[:-1]
    )
    assert numbers == list(range(2500))
    assert sorted(corpus.held_out.tobytes().split(b"\n")) == [
        b"for the choices",
        b"held out",
    ]
    assert "relpos_notes/1.0.0" in corpus.description
    assert "train, validation" in corpus.description
    # Prepared now, and read again without preparing.
    again = corpora.load("tfds:relpos_notes", data_dir=tmp_path)
    assert again.sha256 == corpus.sha256
    # Each document of words ends with the end of a line, the last one too.
    words = corpora.load("tfds:relpos_notes", data_dir=tmp_path, vocabulary="words")
    ends = words.train == words.vocabulary.words.index("<eos>")
    assert ends.sum() == 2 * 2500 and ends[-1]
    assert words.train_documents.size == 2500
    first = words.vocabulary.words.index("document")
    assert (words.train[words.train_documents] == first).all()
    some = corpora.load("tfds:relpos_notes", data_dir=tmp_path, max_bytes=100)
    assert some.train.tobytes() == corpus.train[:90].tobytes()
    assert some.held_out.tobytes() == corpus.held_out[:10].tobytes()


def test_one_split_is_split_by_position(tmp_path, reachable):
    corpus = corpora.load("tfds:relpos_one_split", data_dir=tmp_path)
    assert corpus.held_out.size == corpus.size // 10


def test_sets_that_cannot_serve_are_refused(tmp_path, reachable):
    with pytest.raises(ValueError, match="no split 'train': it has .'test'"):
        corpora.load("tfds:relpos_no_train", data_dir=tmp_path)
    with pytest.raises(ValueError, match="no text to model.*found .'label'"):
        corpora.load("tfds:relpos_numbers", data_dir=tmp_path)


def test_failed_preparation_says_why_and_what_to_do(tmp_path, reachable):
    with pytest.raises(RuntimeError, match="a_module_that_nobody_has") as caught:
        corpora.load("tfds:relpos_fails", data_dir=tmp_path)
    assert "file_format='array_record'" in str(caught.value)
    from tensorflow_datasets.core.download import downloader

    assert downloader.MAX_RETRIES > 0  # as TFDS has it, for its other users


def test_tfrecord_is_refused_with_what_to_do(tmp_path, reachable, monkeypatch):
    def refuse(self, **kwargs):
        raise NotImplementedError("Random access ... FileFormat.TFRECORD")

    monkeypatch.setattr(RelposOneSplit, "as_data_source", refuse)
    with pytest.raises(RuntimeError, match="cannot be read here.*array_record"):
        corpora.load("tfds:relpos_one_split", data_dir=tmp_path)


def test_an_unknown_name_gets_the_nearest_not_the_list():
    with pytest.raises(ValueError, match="nearest names: tiny_shakespeare") as caught:
        corpora.load("tfds:tiny_shakespear")
    assert len(str(caught.value)) < 200


def test_an_unknown_config_is_refused(tmp_path):
    with pytest.raises(ValueError, match="tfds:lm1b/none cannot be opened"):
        corpora.load("tfds:lm1b/none", data_dir=tmp_path)


@pytest.mark.parametrize("name", ["tiny_shakespeare", "lm1b", "pg19", "wiki40b/en"])
def test_without_a_network_the_answer_comes_in_seconds(tmp_path, monkeypatch, name):
    def refuse(*args, **kwargs):
        raise socket.gaierror(-2, "Name or service not known")

    monkeypatch.setattr(socket, "getaddrinfo", refuse)
    start = time.monotonic()
    with pytest.raises(RuntimeError, match="nothing can be downloaded") as caught:
        corpora.load(f"tfds:{name}", data_dir=tmp_path)
    assert time.monotonic() - start < 10
    assert "'stdlib' or 'file:PATH'" in str(caught.value)


def test_a_silent_name_server_is_not_waited_for(monkeypatch):
    over = threading.Event()

    def wait(*args, **kwargs):
        over.wait(30)
        raise socket.gaierror(-3, "Temporary failure in name resolution")

    monkeypatch.setattr(socket, "getaddrinfo", wait)
    monkeypatch.setattr(tfds_text, "_SECONDS", 0.1)
    start = time.monotonic()
    try:
        found = tfds_text._unreachable_host(["http://host.example"])
    finally:
        over.set()
    assert "no answer in 0.1 s" in found
    assert time.monotonic() - start < 10


def test_a_download_that_fails_is_not_repeated(tmp_path, monkeypatch):
    # The host answered a moment ago, and then the download itself cannot be made.
    monkeypatch.setattr(tfds_text, "_connect", lambda host, port: None)

    def refuse(*args, **kwargs):
        raise socket.gaierror(-2, "Name or service not known")

    monkeypatch.setattr(socket, "getaddrinfo", refuse)
    start = time.monotonic()
    with pytest.raises(RuntimeError, match="ConnectionError"):
        corpora.load("tfds:tiny_shakespeare", data_dir=tmp_path)
    assert time.monotonic() - start < 10


def test_a_proxy_is_asked_instead(monkeypatch):
    asked = []
    monkeypatch.setattr(tfds_text, "_connect", lambda *place: asked.append(place))
    for name in ("http_proxy", "https_proxy", "no_proxy", "all_proxy"):
        monkeypatch.delenv(name, raising=False)
        monkeypatch.delenv(name.upper(), raising=False)
    monkeypatch.setenv("https_proxy", "http://gate.example:3128")
    urls = ["https://a.example/x", "https://b.example/y", "http://c.example/z"]
    assert tfds_text._unreachable_host(urls) is None
    assert asked == [("c.example", 80), ("gate.example", 3128)]


def test_records_are_joined_only_as_far_as_needed():
    class Source(list):
        read = 0

        def __getitems__(self, rows):
            self.read += len(rows)
            return [{"text": self[row]} for row in rows]

    source = Source(["ab", b"cd"] * 3000)
    records = tfds_text._records(source, "text")
    text = b"".join(record.text for record in records)
    assert text == b"ab\ncd\n" * 2999 + b"ab\ncd"
    source.read = 0
    records = tokens.before(tfds_text._records(source, "text"), 100, "byte")
    text = b"".join(record.text for record in records)
    assert text == (b"ab\ncd\n" * 20)[:100]
    assert source.read == 64

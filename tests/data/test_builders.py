import functools
import http.server
import socket
import tarfile
import threading
import time
import zipfile

import numpy as np
import pytest

from relpos_jax.data import corpora, prepare, saved
from relpos_jax.data.text_files import UnusableFile
from tests.data import made_up


def words(path) -> int:
    text = path.read_text()
    return len(text.split()) + text.count("\n")


@pytest.fixture
def penn(tmp_path, monkeypatch):
    """A folder of small files, whose counts are taken for the published ones."""
    folder = made_up.penn(tmp_path / "files")
    made_up.expect(monkeypatch, "ptb", *(words(folder / n) for n in made_up.PTB))
    return folder


def test_a_set_is_prepared_from_a_folder_and_read_without_it(tmp_path, penn):
    where = dict(data_dir=tmp_path / "data")
    report = prepare.prepare("ptb", manual_dir=penn, **where)
    assert "420 words and ends of lines, as published" in report
    assert "vocabulary: words, 7 ids" in report
    assert "--config.data.vocabulary_size=7" in report
    for file in penn.iterdir():
        file.unlink()
    corpus = corpora.load("tfds:ptb", vocabulary="words", **where)
    text = corpus.vocabulary.decode(np.asarray(corpus.train)).decode()
    assert text.startswith("the <unk> cat no. sat\nthe <unk> cat no. N sat\n")
    assert (corpus.train.size, corpus.held_out.size) == (420, 42)
    assert corpus.held_out_bytes == 6 * len(" the <unk> cat no. sat \n") + 2 * 6
    assert isinstance(corpus.train, np.memmap)
    again = corpora.load("tfds:ptb", vocabulary="words", **where)
    assert again.sha256 == corpus.sha256
    # A vocabulary that is given is the same one, and another split has it too.
    test = corpora.load(
        "tfds:ptb", vocabulary=corpus.vocabulary, held_out_split="test", **where
    )
    assert (test.folder, test.held_out.size) == (corpus.folder, 42)
    with pytest.raises(ValueError, match="no split 'tset': it has"):
        corpora.load("tfds:ptb", held_out_split="tset", **where)
    # As bytes, the very file.
    raw = corpora.load("tfds:ptb", **where)
    assert raw.train[:12].tobytes() == b" the <unk> c"
    with pytest.raises(ValueError, match="prepared already under .*delete that folder"):
        prepare.prepare("ptb", manual_dir=penn, **where)


def test_other_counts_are_refused_unless_accepted(tmp_path, penn, monkeypatch):
    made_up.expect(monkeypatch, "ptb", 421, 48, 42)
    where = dict(manual_dir=penn, data_dir=tmp_path / "data")
    with pytest.raises(UnusableFile, match="ptb.train.txt: .* has 420 .*expected 421"):
        prepare.prepare("ptb", **where)
    # Nothing of it is taken for prepared.
    with pytest.raises(UnusableFile, match="expected 421"):
        prepare.prepare("ptb", **where)
    report = prepare.prepare("ptb", accept_other_counts=True, **where)
    assert "420 words and ends of lines, NOT the 421 of the documentation" in report


def test_articles_of_wikitext_are_documents(tmp_path, monkeypatch):
    folder = made_up.wikitext(tmp_path / "files")
    made_up.expect(
        monkeypatch, "wikitext103", *(words(folder / n) for n in made_up.WIKI)
    )
    report = prepare.prepare("wikitext103", manual_dir=folder, data_dir=tmp_path)
    assert "20 documents" in report
    corpus = corpora.load("tfds:wikitext103", vocabulary="words", data_dir=tmp_path)
    assert corpus.train_documents.size == 20
    train, known = np.asarray(corpus.train), corpus.vocabulary.words
    # The first article has the blank line before its heading, the others begin with it.
    starts = [known[train[start]] for start in corpus.train_documents]
    assert starts == ["<eos>", *["="] * 19]
    # The vocabulary is counted on the training text alone, and has no title of another.
    assert "19" in known
    held_out = [known[index] for index in corpus.held_out]
    assert held_out[1:6] == ["=", "Title", "1", "0", "="]


def test_characters_and_cut_files(tmp_path, penn, monkeypatch):
    made_up.expect(monkeypatch, "ptb_characters", 0, 0, 0)
    where = dict(manual_dir=penn, data_dir=tmp_path / "data", accept_other_counts=True)
    report = prepare.prepare("ptb_characters", **where)
    corpus = corpora.load(
        "tfds:ptb_characters", vocabulary="characters", data_dir=tmp_path / "data"
    )
    assert f"vocabulary: characters, {corpus.vocabulary.size} ids" in report
    assert corpus.vocabulary.decode(np.asarray(corpus.train[:9])) == b"the <unk>"
    made_up.expect(monkeypatch, "text8", 90, 5, 5)
    (penn / "text8").write_bytes(b"abcdefghi " * 10)
    prepare.prepare("text8", manual_dir=penn, data_dir=tmp_path / "data")
    corpus = corpora.load("tfds:text8", vocabulary="text8", data_dir=tmp_path / "data")
    assert (corpus.train.size, corpus.held_out.size) == (90, 5)
    assert corpus.train.dtype == np.uint8
    assert corpus.vocabulary.decode(np.asarray(corpus.held_out)) == b"abcde"


def test_without_a_network_the_command_to_use_is_named(tmp_path, monkeypatch):
    def refuse(*args, **kwargs):
        raise socket.gaierror(-2, "Name or service not known")

    monkeypatch.setattr(socket, "getaddrinfo", refuse)
    start = time.monotonic()
    with pytest.raises(RuntimeError, match="manual_dir=FOLDER") as caught:
        corpora.load("tfds:enwik8", data_dir=tmp_path)
    assert time.monotonic() - start < 10
    assert "http://mattmahoney.net/dc/enwik8.zip" in str(caught.value)
    assert "experiments.prepare_data --dataset=enwik8" in str(caught.value)


def test_sets_of_tfds_take_no_folder(tmp_path):
    with pytest.raises(ValueError, match="lm1b takes no manual_dir; these sets"):
        prepare.prepare("lm1b", manual_dir=tmp_path)
    with pytest.raises(ValueError, match="nearest names: .*wikitext"):
        prepare.prepare("wikitext-103", data_dir=tmp_path)


def test_damaged_tokens_are_named(tmp_path, penn):
    prepare.prepare("ptb", manual_dir=penn, data_dir=tmp_path / "data")
    corpus = corpora.load("tfds:ptb", vocabulary="words", data_dir=tmp_path / "data")
    saved.save(corpus.vocabulary, tmp_path / "words.json")
    path = corpus.folder / "train.tokens"
    path.write_bytes(path.read_bytes()[:100])
    with pytest.raises(ValueError, match="train.tokens has 100 bytes: .* the 420"):
        corpora.load("tfds:ptb", vocabulary="words", data_dir=tmp_path / "data")


@pytest.fixture
def server(tmp_path):
    """Serves the folder `served` on this machine; yields its address."""
    (tmp_path / "served").mkdir()
    handler = functools.partial(Quiet, directory=tmp_path / "served")
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), handler) as found:
        thread = threading.Thread(target=found.serve_forever, daemon=True)
        thread.start()
        yield f"http://127.0.0.1:{found.server_port}"
        found.shutdown()
        thread.join()


class Quiet(http.server.SimpleHTTPRequestHandler):
    def log_message(self, *args):
        pass


def test_a_set_is_downloaded_and_unpacked(tmp_path, penn, monkeypatch, server):
    for name in ("http_proxy", "HTTP_PROXY", "all_proxy", "ALL_PROXY"):
        monkeypatch.delenv(name, raising=False)
    counts = [words(penn / name) for name in made_up.PTB]
    archive = f"{server}/simple-examples.tgz"
    made_up.expect(monkeypatch, "ptb", *counts, url=archive)
    with pytest.raises(RuntimeError, match="preparing it failed.*experiments.prepare"):
        prepare.prepare("ptb", data_dir=tmp_path / "data")
    with tarfile.open(tmp_path / "served" / "simple-examples.tgz", "w:gz") as tar:
        for path in penn.iterdir():
            tar.add(path, f"simple-examples/data/{path.name}")
    report = prepare.prepare("ptb", data_dir=tmp_path / "data")
    assert f"{counts[0]} words and ends of lines, as published" in report
    page = f"{server}/page.tgz"
    (tmp_path / "served" / "page.tgz").write_text("<html>please log in</html>")
    made_up.expect(monkeypatch, "ptb", *counts, url=page)
    for _ in range(2):
        with pytest.raises(UnusableFile, match="page.tgz gave no .*log in"):
            prepare.prepare("ptb", data_dir=tmp_path / "other")
    with zipfile.ZipFile(tmp_path / "served" / "text8.zip", "w") as file:
        file.writestr("text8", b"abcdefghi " * 10)
    zipped = f"{server}/text8.zip"
    made_up.expect(monkeypatch, "text8", 90, 5, 5, url=zipped)
    assert "90 bytes, as published" in prepare.prepare("text8", data_dir=tmp_path / "d")
    whole = (tmp_path / "served" / "text8.zip").read_bytes()
    (tmp_path / "served" / "text8.zip").write_bytes(whole[:-30])
    with pytest.raises(UnusableFile, match="text8.zip gave no whole archive"):
        prepare.prepare("text8", data_dir=tmp_path / "e")

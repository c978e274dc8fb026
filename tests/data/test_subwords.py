"""Subwords of files that the user brings.

The libraries are optional, and the tests run without them too: then a stand-in answers
as they do, which shows our side of it and not theirs.
"""

import builtins
import importlib.util
import sys
import types

import numpy as np
import pytest

from relpos_jax.data import saved, subwords, tokens
from relpos_jax.data.vocabulary import metric

PIECES = ["<unk>", "▁the", "▁cat", "▁s", "at"]
TEXT = "the cat\nthe cat sat"


class Processor:
    """Answers as `sentencepiece.SentencePieceProcessor` for `PIECES`."""

    def __init__(self, model_proto):
        if model_proto != b"a model":
            raise RuntimeError("could not parse the ModelProto")

    def get_piece_size(self):
        return len(PIECES)

    def encode(self, lines, out_type):
        found = {"the": [1], "cat": [2], "sat": [3, 4]}
        return [[i for word in line.split() for i in found[word]] for line in lines]

    def decode(self, ids):
        return "".join(PIECES[i] for i in ids).replace("▁", " ").strip()


@pytest.fixture
def stand_in(monkeypatch):
    module = types.ModuleType("sentencepiece")
    module.SentencePieceProcessor = Processor
    monkeypatch.setitem(sys.modules, "sentencepiece", module)


def test_a_model_is_brought_and_saved_with_the_run(tmp_path, stand_in):
    path = tmp_path / "my.model"
    path.write_bytes(b"a model")
    vocabulary = tokens.known(f"sentencepiece:{path}")
    assert (vocabulary.size, vocabulary.unit, vocabulary.name) == (
        5,
        "subword",
        "sentencepiece",
    )
    ids = vocabulary.encode(TEXT.encode())
    assert ids.tolist() == [1, 2, 1, 2, 3, 4]
    assert ids.dtype == np.int32
    assert vocabulary.decode(ids) == b"the cat the cat sat"
    with pytest.raises(ValueError, match="id 5 at index 1 is no subword"):
        vocabulary.decode(np.array([0, 5]))
    path.unlink()  # the run has it
    saved.save(tokens.known(vocabulary), tmp_path / saved.FILE)
    assert tokens.of_run(tmp_path, 5) == vocabulary
    assert list(metric(vocabulary, 1.0)) == ["perplexity"]


def test_files_that_are_no_model_are_refused(tmp_path, stand_in):
    path = tmp_path / "my.model"
    path.write_bytes(b"<html>")
    with pytest.raises(ValueError, match="no model of sentencepiece in these 6 bytes"):
        tokens.known(f"sentencepiece:{path}")
    with pytest.raises(FileNotFoundError):
        tokens.known(f"sentencepiece:{tmp_path / 'absent'}")
    with pytest.raises(ValueError, match="unknown kind of subwords 'bpe'"):
        subwords.Subwords("bpe", b"")


@pytest.mark.parametrize("kind", ["sentencepiece", "tokenizers"])
def test_without_the_package_its_name_is_said(tmp_path, monkeypatch, kind):
    monkeypatch.delitem(sys.modules, kind, raising=False)
    before = builtins.__import__

    def absent(name, *args, **kwargs):
        if name == kind:
            raise ImportError(name)
        return before(name, *args, **kwargs)

    monkeypatch.setattr(subwords.importlib, "import_module", absent)
    path = tmp_path / "model"
    path.write_bytes(b"a model")
    with pytest.raises(ImportError, match=f"needs the package {kind}: pip install"):
        tokens.known(f"{kind}:{path}")


needs = {
    kind: pytest.mark.skipif(
        importlib.util.find_spec(kind) is None, reason=f"{kind} is not installed"
    )
    for kind in ("sentencepiece", "tokenizers")
}


@needs["tokenizers"]
def test_a_real_byte_level_tokenizer_gives_the_text_back(tmp_path):
    from tokenizers import ByteLevelBPETokenizer

    lines = ["the cat sat on the mat\n", "naïve café €\n"] * 20
    tokenizer = ByteLevelBPETokenizer()
    tokenizer.train_from_iterator(lines, vocab_size=280, show_progress=False)
    path = tmp_path / "tokenizer.json"
    tokenizer.save(str(path))
    vocabulary = tokens.known(f"tokenizers:{path}")
    text = "".join(lines) + "\n\n the naïve"
    ids = vocabulary.encode(text)
    assert vocabulary.decode(ids).decode() == text
    assert vocabulary.size == 280 > ids.max()
    # However the text is cut at line ends, its ids are the same.
    cut = text.index("naïve")
    parts = [vocabulary.encode(text[:cut]), vocabulary.encode(text[cut:])]
    np.testing.assert_array_equal(np.concatenate(parts), ids)


@needs["sentencepiece"]
def test_a_real_sentencepiece_model(tmp_path):
    import io

    import sentencepiece

    model = io.BytesIO()
    sentencepiece.SentencePieceTrainer.train(
        sentence_iterator=iter(["the cat sat on the mat", "the dog ran"] * 20),
        model_writer=model,
        vocab_size=30,
        model_type="bpe",
        minloglevel=2,
    )
    path = tmp_path / "my.model"
    path.write_bytes(model.getvalue())
    vocabulary = tokens.known(f"sentencepiece:{path}")
    ids = vocabulary.encode("the cat\nran")
    assert vocabulary.size == 30 and ids.max() < 30
    assert vocabulary.decode(ids) == b"the cat ran"  # its normalisation has no lines
    saved.save(vocabulary, tmp_path / saved.FILE)
    assert tokens.of_run(tmp_path, 30) == vocabulary

import collections
import math

import numpy as np
import pytest

from relpos_jax.data import Bytes, Characters, Words, saved, tokens
from relpos_jax.data.vocabulary import TEXT8, frequency_cutoffs, metric, split_words

LINES = " = A title = \n \n the cat <unk> the mat\nthe end\n"


def words() -> Words:
    return Words.of(collections.Counter(split_words(LINES, "<eos>")))


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


def test_characters_are_code_points():
    vocabulary = Characters.of(["aé\n€".encode(), b"ba"])
    assert vocabulary.alphabet == "\nabé€"
    ids = vocabulary.encode("aé\n€")
    assert ids.tolist() == [1, 3, 0, 4]
    assert vocabulary.decode(ids).decode() == "aé\n€"
    with pytest.raises(ValueError, match=r"'ß' at index 1 .* 5 characters \(2 of 3"):
        vocabulary.encode("aß\U0001f600")
    with pytest.raises(ValueError, match="not UTF-8: byte 0xe9 at offset 1"):
        vocabulary.encode("né".encode("latin-1"))
    with pytest.raises(ValueError, match="id 5 at index 0 is no character"):
        vocabulary.decode(np.array([5]))
    with pytest.raises(ValueError, match="none twice"):
        Characters("aa")


def test_text8_has_27():
    assert TEXT8.size == 27
    assert TEXT8.encode(" az").tolist() == [0, 1, 26]


def test_words_are_in_the_order_of_frequency_and_then_of_occurrence():
    vocabulary = words()
    # Four ends of lines; "=" and "the" occur often, the rest once each.
    assert vocabulary.words[:3] == ("<eos>", "the", "=")
    assert vocabulary.words[3:] == ("A", "title", "cat", "<unk>", "mat", "end")
    ids = vocabulary.encode("the dog\n")
    assert ids.tolist() == [1, vocabulary.words.index("<unk>"), 0]


def test_words_count_ends_of_lines_and_not_spacing():
    vocabulary = words()
    ids = vocabulary.encode(LINES)
    assert ids.size == len(LINES.split()) + LINES.count("\n") == 15
    assert vocabulary.decode(ids) == b"= A title =\n\nthe cat <unk> the mat\nthe end\n"
    again = vocabulary.encode(vocabulary.decode(ids))
    np.testing.assert_array_equal(again, ids)
    # A line that goes on, as a prompt does, has no end.
    assert vocabulary.encode("the cat").size == 2


def test_rare_words_become_unknown():
    counts = {"a": 5, "b": 3, "c": 3, "d": 1}
    vocabulary = Words.of(counts, least=3)
    assert vocabulary.words == ("<eos>", "<unk>", "a", "b", "c")
    assert Words.of(counts, size=4).words == ("<eos>", "<unk>", "a", "b")
    kept = Words.of({"a": 5, "b": 3, "<unk>": 1}, size=3)
    assert kept.words == ("<eos>", "a", "<unk>")
    assert Words.of(counts, unk=None).words == ("<eos>", "a", "b", "c", "d")
    with pytest.raises(ValueError, match="'x' is not in the vocabulary of 5 words"):
        Words.of(counts, unk=None).encode("a x")


def test_words_that_cannot_be_are_refused():
    with pytest.raises(ValueError, match="the word 'a' more than once"):
        Words(("<eos>", "<unk>", "a", "a"))
    with pytest.raises(ValueError, match="no '<unk>', which is its unk"):
        Words(("<eos>", "a"))
    with pytest.raises(ValueError, match="'<eos>', which stands for the end of a line"):
        words().encode("a <eos> b")


def test_cutoffs_follow_from_frequencies():
    counts = [60, 20, 10, 5, 2, 1, 1, 1]
    assert frequency_cutoffs(counts, (0.5, 0.8, 0.95)) == (1, 2, 4)
    for cutoff, share in zip((1, 2, 4), (0.5, 0.8, 0.95), strict=True):
        assert sum(counts[:cutoff]) >= share * 100 > sum(counts[: cutoff - 1])
    assert frequency_cutoffs(counts, (0.1, 0.5, 0.9999)) == (1,)
    with pytest.raises(ValueError, match="id 1 is more frequent than id 0"):
        frequency_cutoffs([1, 2])
    with pytest.raises(ValueError, match="between 0 and 1"):
        frequency_cutoffs(counts, (1.5,))


def test_a_loss_is_named_after_the_unit():
    assert metric(Bytes(), 0.9) == {"bits_per_byte": pytest.approx(1.29843, rel=1e-5)}
    assert list(metric(TEXT8, 0.9)) == ["bits_per_character"]
    assert metric(words(), 3.0) == {"perplexity": pytest.approx(math.exp(3.0))}
    assert metric(words(), 1e4) == {"perplexity": math.inf}


@pytest.mark.parametrize("vocabulary", [Bytes(), TEXT8, words()])
def test_a_saved_vocabulary_is_the_same(tmp_path, vocabulary):
    path = tmp_path / "vocabulary.json"
    saved.save(vocabulary, path)
    again = saved.read(path)
    assert again == vocabulary
    assert saved.fingerprint(again) == saved.fingerprint(vocabulary)
    assert tokens.known(f"saved:{path}") == vocabulary
    assert [p.name for p in tmp_path.iterdir()] == ["vocabulary.json"]


def test_fingerprints_tell_vocabularies_apart():
    other = Words(words().words, lower=True)
    prints = {saved.fingerprint(v) for v in (Bytes(), TEXT8, words(), other)}
    assert len(prints) == 4


@pytest.mark.parametrize("text", ["", "[]", "{}", '{"kind": "words"}', '{"kind": 3}'])
def test_files_that_hold_no_vocabulary_are_named(tmp_path, text):
    path = tmp_path / "vocabulary.json"
    path.write_text(text)
    with pytest.raises(ValueError, match="vocabulary.json holds no vocabulary"):
        saved.read(path)


def test_a_list_of_words_is_read(tmp_path):
    path = tmp_path / "1b_word_vocab.txt"
    path.write_text("<S> 7\n</S> 0\n<UNK> 5\nthe 4\n")
    vocabulary = tokens.known(f"words:{path}")
    assert vocabulary.words == ("<S>", "</S>", "<UNK>", "the")
    assert vocabulary.encode("the cat\n").tolist() == [3, 2, 0]
    path.write_text("the\ncat\n")
    with pytest.raises(ValueError, match="no list of words.*<S> and <UNK>"):
        tokens.known(f"words:{path}")
    path.write_text("<eos>\n<unk>\nthe\nthe\n")
    with pytest.raises(ValueError, match="1b_word_vocab.txt.*'the' more than once"):
        tokens.known(f"words:{path}")


def test_a_runs_vocabulary_is_claimed_and_kept(tmp_path):
    saved.claim(tmp_path, words(), resuming=False)
    saved.claim(tmp_path, words(), resuming=True)
    other = Words(("<eos>", "<unk>", *(f"w{i}" for i in range(words().size - 2))))
    with pytest.raises(ValueError, match="holds a run whose vocabulary is words with"):
        saved.claim(tmp_path, other, resuming=True)
    saved.check_size(words(), words().size)
    with pytest.raises(ValueError, match="does not fit the model, which has 256 ids"):
        saved.check_size(words(), 256)
    assert tokens.of_run(tmp_path, words().size) == words()
    with pytest.raises(ValueError, match="the model beside it has 256 ids"):
        tokens.of_run(tmp_path, 256)


def test_a_run_without_a_file_is_of_bytes_or_unknown(tmp_path):
    assert tokens.of_run(tmp_path, 256) == Bytes()
    with pytest.raises(ValueError, match="no vocabulary.json, so its 9 ids"):
        tokens.of_run(tmp_path, 9)
    with pytest.raises(ValueError, match="the model has 9 ids, and the vocabulary is"):
        tokens.of_run(tmp_path, 9, "text8")
    assert tokens.of_run(tmp_path, 27, "text8") == TEXT8


@pytest.mark.parametrize("spec", ["word", "words:", "", "bpe:x"])
def test_unknown_vocabularies_are_refused(spec):
    with pytest.raises(ValueError, match="unknown vocabulary .*'sentencepiece:PATH'"):
        tokens.known(spec)

import pytest

from relpos_jax.data import text_files, text_sets
from relpos_jax.data.text_files import UnusableFile
from tests.data.made_up import article


def read(path, name, split="train"):
    found = text_sets.SETS[name]
    checker = text_files.Checker(found, split)
    records = list(text_files.records(path, found, split))
    for record in records:
        checker.add(record)
    return records, checker


@pytest.mark.parametrize(
    "data, message",
    [
        (b"", "is empty: expected the text of ptb"),
        (b"PK\x03\x04rest", "is a zip archive: unpack it; expected plain text"),
        (b"\x1f\x8brest", "is a gzip archive"),
        (b"PAR1", "is a parquet file"),
        (b"version https://git-lfs.github.com/spec/v1\n", "is a pointer of Git LFS"),
        (
            b"\xef\xbb\xbfa b\n",
            "is text with a byte order mark in front: save it as UTF-8 without",
        ),
        ("a b\n".encode("utf-16"), "is text in UTF-16"),
        ("a b\n".encode("utf-16-le"), "has zero bytes, as UTF-16"),
        (b"<!DOCTYPE html><html>404", "is a web page, probably of an error.*DOCTYPE"),
        (b"\n <HTML lang=en>", "is a web page"),
    ],
)
def test_what_is_evidently_no_text_is_named(tmp_path, data, message):
    for name in ("ptb.train.txt", "ptb.valid.txt", "ptb.test.txt"):
        (tmp_path / name).write_bytes(data)
    with pytest.raises(UnusableFile, match=f"ptb.train.txt {message}"):
        text_files.find(tmp_path, text_sets.SETS["ptb"])


@pytest.mark.parametrize(
    "data, message",
    [
        (b"a b\nc d\r\ne\n", "has the line end CRLF in line 2: expected LF"),
        (b"a b\n\xe9t\xe9\n", "not UTF-8: byte 0xe9 at offset 4 .*perhaps Latin-1"),
    ],
)
def test_text_of_another_kind_is_named_with_the_place(tmp_path, data, message):
    path = tmp_path / "ptb.train.txt"
    path.write_bytes(data)
    for name in ("ptb", "wikitext2", "ptb_characters"):
        with pytest.raises(UnusableFile, match=f"ptb.train.txt (is )?{message}"):
            read(path, name)


def test_absent_files_are_named_with_what_is_there(tmp_path):
    found = text_sets.SETS["wikitext103"]
    with pytest.raises(UnusableFile, match="absent is no folder: wikitext103 needs"):
        text_files.find(tmp_path / "absent", found)
    with pytest.raises(UnusableFile, match="wiki.train.tokens or train.txt .*no files"):
        text_files.find(tmp_path, found)
    (tmp_path / "wikitext-103-v1.zip").write_bytes(b"PK")
    with pytest.raises(UnusableFile, match="which has wikitext-103-v1.zip"):
        text_files.find(tmp_path, found)


def test_files_are_found_under_either_name_and_below(tmp_path):
    below = tmp_path / "wikitext-103"
    below.mkdir()
    for name in ("wiki.train.tokens", "wiki.valid.tokens", "wiki.test.tokens"):
        (below / name).write_text("a\n")
    (tmp_path / "test.txt").write_text("b\n")
    paths = text_files.find(tmp_path, text_sets.SETS["wikitext103"])
    assert paths["train"] == below / "wiki.train.tokens"
    assert paths["test"] == tmp_path / "test.txt"


def test_a_whole_file_has_the_size_of_its_parts_and_is_cut_by_bytes(tmp_path, small):
    path = tmp_path / "enwik8"
    data = "aé\n€üx".encode() * 10
    path.write_bytes(data)
    with pytest.raises(UnusableFile, match="has 100 bytes: expected the 99 of enwik8"):
        small("enwik8", 90, 4, 5)
        text_files.find(tmp_path, text_sets.SETS["enwik8"])
    small("enwik8", 92, 4, 4)  # within a character, twice
    assert text_files.find(tmp_path, text_sets.SETS["enwik8"]) == {"whole": path}
    texts = [read(path, "enwik8", split) for split in ("train", "validation", "test")]
    assert b"".join(r.text for records, _ in texts for r in records) == data
    assert [checker.facts.count for _, checker in texts] == [92, 4, 4]
    assert [checker.problem() for _, checker in texts] == [None] * 3
    path.write_bytes(data[:50] + b"\xff" + data[51:])
    with pytest.raises(UnusableFile, match="enwik8 is not UTF-8: .*at offset 50"):
        read(path, "enwik8")
    path.write_bytes(data[:99].replace(b"\n", b"\r\n"))
    with pytest.raises(UnusableFile, match="its line ends are CRLF: expected LF"):
        text_files.find(tmp_path, text_sets.SETS["enwik8"])


def test_text8_has_its_alphabet_only(tmp_path, small):
    small("text8", 8, 1, 1)
    path = tmp_path / "text8"
    path.write_bytes(b"ab cd ef z")
    records, checker = read(path, "text8")
    assert (records[0].text, checker.problem()) == (b"ab cd ef", None)
    path.write_bytes(b"ab cD ef z")
    with pytest.raises(UnusableFile, match="the byte b'D' at offset 4: expected text8"):
        read(path, "text8")


def test_articles_are_documents_and_all_of_the_text(tmp_path):
    path = tmp_path / "wiki.train.tokens"
    formula = " = 1 and = \n a line \n"  # between no blank lines: no heading
    texts = [article("One", "a b"), article("Two <unk>", "c") + formula, article("3")]
    path.write_text("".join(texts))
    records, checker = read(path, "wikitext2")
    assert len(records) == checker.facts.documents == 3
    assert b"".join(record.text for record in records).decode() == "".join(texts)
    assert records[1].text.startswith(b" = Two <unk> = \n")
    assert all(record.begins for record in records)
    whole = "".join(texts)
    assert checker.facts.count == len(whole.split()) + whole.count("\n")


def test_the_last_line_ends_too(tmp_path):
    path = tmp_path / "ptb.train.txt"
    path.write_text("a b\nc")
    _, checker = read(path, "ptb")
    assert checker.facts.count == 5


def test_characters_are_put_together_again(tmp_path):
    path = tmp_path / "ptb.char.train.txt"
    path.write_text("a _ b c\n< u n k >\n")
    records, checker = read(path, "ptb_characters")
    assert records[0].text == b"a bc\n<unk>\n"
    assert checker.facts.count == 11
    path.write_text("the cat\n")
    with pytest.raises(UnusableFile, match="'the' where characters stand alone"):
        read(path, "ptb_characters")


def test_another_count_says_what_was_expected(tmp_path):
    path = tmp_path / "wiki.train.tokens"
    path.write_text(article("One", "a b"))
    _, checker = read(path, "wikitext103")
    problem = checker.problem()
    assert "has 21 words and ends of lines: expected 103,227,021 (Merity" in problem
    assert "there are fewer" in problem
    path.write_text("a b\n")
    _, checker = read(path, "ptb_characters")
    assert "expected 5,059 thousand" in checker.problem()


def test_thousands_are_cut_off(tmp_path, small):
    small("ptb_characters", 2, 0, 0)
    path = tmp_path / "x"
    for count, problem in ((1999, "fewer"), (2000, None), (2999, None), (3000, "more")):
        path.write_text("a " * (count - 1) + "\n")
        _, checker = read(path, "ptb_characters")
        assert checker.facts.count == count
        found = checker.problem()
        assert (found is None) == (problem is None)
        assert problem is None or f"so there are {problem}" in found


@pytest.mark.parametrize("name", ["wikitext103", "wikitext2"])
@pytest.mark.parametrize("split", ["validation", "test"])
def test_real_wikitext_has_its_published_counts(shared, name, split):
    short = {"validation": "valid"}.get(split, split)
    records, checker = read(shared / "data" / f"wikitext_{short}.txt", name, split)
    assert checker.problem() is None
    assert checker.facts.count == {"validation": 217_646, "test": 245_569}[split]
    assert len(records) == 60


@pytest.fixture
def small(monkeypatch):
    from tests.data.made_up import expect

    return lambda name, *counts: expect(monkeypatch, name, *counts)

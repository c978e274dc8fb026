"""Models of words, from files to samples: prepare, train, evaluate, generate."""

import json
import math

import jax
import numpy as np
import pytest

from configs import (
    alibi_wikitext103,
    enwik8,
    one_billion_word,
    ptb,
    quick,
    text8,
    wikitext103,
)
from relpos_jax import config as configs
from relpos_jax.data import prepare, saved, tokens
from relpos_jax.evaluation import generation, perplexity, texts
from relpos_jax.evaluation.sampling import SamplingConfig
from relpos_jax.interop import runs
from relpos_jax.training import loop
from tests.data import made_up

CUTOFFS = (8, 20)


def words(path) -> int:
    text = path.read_text(encoding="utf-8")
    return len(text.split()) + text.count("\n")


def small(config, folder, ids):
    """Returns a config's run with small sizes, its data in `folder`."""
    config.data.data_dir = str(folder)
    config.data.vocabulary_size, config.data.documents = ids, True
    config.model.update(layers=1, width=16, heads=2, head_dim=8, feedforward=16)
    config.model.memory_length = 8
    config.training.update(length=8, batch=2, steps=3, log_every=1, steps_per_call=2)
    if config.model.get("adaptive") is not None:
        config.model.adaptive.cutoffs = CUTOFFS
    return configs.build(config)


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    """A run of `configs/wikitext103.py`, on a text in WikiText's format."""
    folder = tmp_path_factory.mktemp("words")
    files = made_up.wikitext(folder / "files")
    with pytest.MonkeyPatch.context() as patch:
        counts = [words(files / name) for name in made_up.WIKI]
        made_up.expect(patch, "wikitext103", *counts)
        report = prepare.prepare("wikitext103", manual_dir=files, data_dir=folder)
        ids = int(report.split("vocabulary: words, ")[1].split()[0])
        run = small(wikitext103.get_config("base"), folder, ids)
        loop.train(run, folder / "run", progress=False)
        yield folder, run, counts


def test_training_reports_perplexity_per_word(trained):
    folder, run, _ = trained
    lines = (folder / "run" / "metrics.jsonl").read_text().splitlines()
    for line in map(json.loads, lines):
        assert line["perplexity"] == pytest.approx(math.exp(line["loss"]))
        assert "bits_per_byte" not in line
    # An untrained model knows nothing of the words.
    first = json.loads(lines[0])["perplexity"]
    assert 0.5 * run.model.vocabulary < first < 2 * run.model.vocabulary


def test_stopped_and_resumed_it_is_the_same_bit_for_bit(trained):
    folder, run, _ = trained
    loop.train(run, folder / "cut", progress=False, stop_after=1)
    resumed = loop.train(run, folder / "cut", progress=False)
    whole = loop.train(run, folder / "run", progress=False)
    jax.tree.map(np.testing.assert_array_equal, resumed.params, whole.params)
    kept = ("loss", "perplexity", "grad_norm", "tokens")
    logs = []
    for name in ("cut", "run"):
        lines = (folder / name / "metrics.jsonl").read_text().splitlines()
        logs.append([[json.loads(line)[key] for key in kept] for line in lines])
    assert logs[0] == logs[1]


def test_evaluation_counts_every_word_of_the_test_set_once(trained):
    folder, run, counts = trained
    config, graphdef, params = runs.load_run(folder / "run")
    size = config.vocabulary
    where = dict(data_dir=str(folder), split="test")
    text = runs.read_text("tfds:wikitext103", folder / "run", size, **where)
    assert (text.unit, len(text.tokens)) == ("word", counts[2])
    language = perplexity.Language.of(graphdef, params)
    score = runs.score(language, text.tokens, 8, config.memory_length)
    found = runs.measures(score, text)
    assert found["tokens"] == counts[2] - 1
    assert found["perplexity"] == pytest.approx(math.exp(score.nll / score.tokens))
    size = (folder / "files" / made_up.WIKI[2]).stat().st_size
    assert found["bytes"] == size - 1  # the first line end follows from nothing
    expected = score.nll / math.log(2) / found["bytes"]
    assert found["bits_per_byte"] == pytest.approx(expected)
    assert "perplexity per word" in runs.summary(found)
    assert "bits per byte of the text" in runs.summary(found)
    part = runs.score(language, text.tokens, 8, config.memory_length, tokens=20)
    assert "bits_per_byte" not in runs.measures(part, text)


def test_a_sample_is_words(trained):
    folder, *_ = trained
    config, _, params = runs.load_run(folder / "run")
    vocabulary = tokens.of_run(folder / "run", config.vocabulary)
    decoder = generation.prepare(config, params, tokens=20)
    written = []
    printer = texts.Printer(written.append, "the cat", vocabulary)
    prompts = [vocabulary.encode("the cat")]
    (row,) = generation.generate(
        decoder, prompts, 6, SamplingConfig(), seeds=3, on_chunk=printer
    )
    printer.close()
    whole = texts.continued("the cat", prompts[0], row.tokens, vocabulary)
    assert "".join(written) == whole + "\n"
    ids = vocabulary.encode(whole)
    np.testing.assert_array_equal(ids, np.concatenate([prompts[0], row.tokens]))
    assert texts.stops(["\\n", "a cat"], vocabulary) == (
        (0,),
        tuple(vocabulary.encode("a cat").tolist()),
    )


def test_another_vocabulary_is_refused_on_resume_and_in_evaluation(trained):
    folder, run, _ = trained
    with pytest.raises(ValueError, match="text8 with|characters with 27 ids"):
        tokens.of_run(folder / "run", run.model.vocabulary, "text8")
    path = folder / "run" / saved.FILE
    kept = path.read_text()
    vocabulary = saved.read(path)
    swapped = (vocabulary.words[0], *vocabulary.words[:0:-1])
    saved.save(type(vocabulary)(swapped), path)
    try:
        with pytest.raises(ValueError, match="holds a run whose vocabulary is words"):
            loop.train(run, folder / "run", progress=False)
    finally:
        path.write_text(kept)
    other = configs.build(quick.get_config())
    corpus = run.data.load()
    with pytest.raises(ValueError, match="does not fit the model, which has 256 ids"):
        loop.train(other, folder / "other", corpus=corpus, progress=False)
    assert not (folder / "other").exists()


@pytest.mark.parametrize(
    "config, source, vocabulary, ids",
    [
        (enwik8, "tfds:enwik8", "bytes", 256),
        (text8, "tfds:text8", "text8", 27),
        (wikitext103, "tfds:wikitext103", "words", 267_735),
        (alibi_wikitext103, "tfds:wikitext103", "words", 267_735),
        (ptb, "tfds:ptb", "words", 10_000),
        (one_billion_word, "tfds:lm1b", "words:1b_word_vocab.txt", 793_471),
    ],
)
def test_configs_name_their_data_and_are_built_without_it(
    config, source, vocabulary, ids
):
    run = configs.build(config.get_config())
    assert (run.data.source, run.data.vocabulary) == (source, vocabulary)
    assert run.model.vocabulary == ids


@pytest.mark.slow
def test_penn_treebank_trains_too(tmp_path, monkeypatch):
    files = made_up.penn(tmp_path / "files")
    counts = [words(files / name) for name in made_up.PTB]
    made_up.expect(monkeypatch, "ptb", *counts)
    prepare.prepare("ptb", manual_dir=files, data_dir=tmp_path)
    run = small(ptb.get_config(), tmp_path, 7)
    result = loop.train(run, tmp_path / "run", progress=False)
    assert result.step == 3


@pytest.mark.slow
def test_one_billion_words_vocabulary_is_a_file(tmp_path, monkeypatch):
    """Sentences of a set of TFDS, and a list of words beside the config."""
    text = tmp_path / "news"
    text.write_text("the cat sat\nthe dog ran\n" * 40)
    (tmp_path / "1b_word_vocab.txt").write_text("<S>\n<UNK>\nthe\ncat\nsat\n")
    monkeypatch.chdir(tmp_path)
    config = one_billion_word.get_config()
    config.data.source = f"file:{text}"
    config.model.adaptive.cutoffs = (2, 3, 4)
    config.data.data_dir, config.data.vocabulary_size = str(tmp_path), 5
    config.model.update(layers=1, width=64, heads=2, head_dim=8, feedforward=16)
    config.model.memory_length = 8
    config.training.update(length=8, batch=2, steps=1)
    run = configs.build(config)
    assert loop.train(run, tmp_path / "run", progress=False).step == 1

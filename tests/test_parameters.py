"""Configs of published models: their counts, and that the byte models can be built."""

import importlib

import pytest

from experiments import parameters as experiment
from relpos_jax import config as configs
from relpos_jax.report import parameters
from relpos_jax.report.parameters import like

pytestmark = pytest.mark.slow  # builds fifteen large models, if only their shapes


@pytest.fixture(scope="module")
def counts():
    return {row.name.removeprefix("configs/"): row for row in experiment.counts()}


def test_counts_print_as_the_papers_do_or_say_why_not(counts):
    assert len(counts) == 15
    differing = {name for name, row in counts.items() if not row.equal}
    assert differing == {"wikitext103.py:large", "one_billion_word.py:base"}
    for name in differing:
        assert counts[name].published.note
        assert counts[name].verdict == "differs, see note"


def test_counts_are_those_of_the_released_models_to_the_last_one(counts):
    # By hand from the released sizes: attention with its own projection of positions
    # 5 w (h d), two norms 4 w, feed-forward 2 w f + f + w, a layer; table, bias, u, v.
    def layer(width, inner, hidden):
        return 5 * width * inner + 4 * width + 2 * width * hidden + hidden + width

    enwik8 = 12 * layer(512, 512, 2048) + 204 * 512 + 204 + 2 * 512
    assert counts["enwik8.py:base"].count == enwik8
    words, clusters = 267_735, 3 * 410 + 3
    base = 16 * layer(410, 410, 2100) + words * 410 + words + clusters + 2 * 410
    assert counts["wikitext103.py:base"].count == base
    tables = 20_000 * 1024 + 20_000 * 256 + 160_000 * 64 + 67_735 * 16
    projections = 1024 * (1024 + 256 + 64 + 16) + 1024 * 1024
    softmax = words + 3 * 1024 + 3
    large = 18 * (layer(1024, 1024, 4096) + 2 * 1024) + tables + projections + softmax
    assert counts["wikitext103.py:large"].count == large


def test_printed_digits():
    assert like(41_055_436, "41 M") == "41 M"
    assert like(466_507_618, "0.46 B") == "0.47 B"
    assert like(839_000_000, "0.8 B") == "0.8 B"
    with pytest.raises(ValueError, match="is not written like '41 M'"):
        like(1, "41M")


@pytest.mark.parametrize("file", experiment.FILES, ids=lambda file: file.__name__)
def test_heads_say_command_figure_and_hardware(file):
    for needed in (
        f"configs/{file.__name__.split('.')[-1]}.py",
        "Hardware:",
        "ublished",
    ):
        assert needed in file.__doc__
    if "position" not in file.get_config.__annotations__:
        with pytest.raises(ValueError, match="unknown variant 'none'"):
            file.get_config("none")


@pytest.mark.parametrize("name", ["enwik8", "text8"])
def test_models_of_bytes_can_be_trained_as_they_are(name):
    file = importlib.import_module(f"configs.{name}")
    for variant in file.PUBLISHED:
        run = configs.build(file.get_config(variant))
        assert run.model.vocabulary == 256
        assert run.model.memory_length == run.training.length
        whole = parameters.model_of(file.get_config(variant), 256)
        assert whole == run.model


def test_only_an_explained_difference_passes_and_not_where_strict(counts, capsys):
    row = counts["ptb.py:ours"]
    assert experiment.show([row], strict=True)
    assert "| 24 M | 24 M | equal |" in capsys.readouterr().out
    wrong = row.published._replace(parameters="25 M")
    assert not experiment.show([row._replace(published=wrong)], strict=False)
    noted = [row._replace(published=wrong._replace(note="a reason"))]
    assert experiment.show(noted, strict=False)
    assert "ours: a reason" in capsys.readouterr().out
    assert not experiment.show(noted, strict=True)

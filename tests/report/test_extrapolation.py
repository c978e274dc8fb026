import base64
import re
from html.parser import HTMLParser

import numpy as np
import pytest

from relpos_jax.report import document, extrapolation, html, markdown, plots, tables
from tests.report import made_up

PNG = b"\x89PNG\r\n\x1a\n"


@pytest.fixture(scope="module")
def written(tmp_path_factory):
    folder = tmp_path_factory.mktemp("report")
    study = made_up.study(seeds=(0, 1), lengths=(64, 80, 1024))
    paths = extrapolation.write(study, folder)
    assert sorted(path.name for path in paths) == sorted(
        path.name for path in folder.iterdir()
    )
    return study, folder


def test_the_files_are_those_promised(written):
    _, folder = written
    assert {path.name for path in folder.iterdir()} == {
        "report.md",
        "report.html",
        "results.csv",
        "extrapolation.png",
        "loss_by_position.png",
    }
    assert (folder / "extrapolation.png").read_bytes().startswith(PNG)
    assert (folder / "loss_by_position.png").read_bytes().startswith(PNG)


def test_the_report_has_every_figure(written):
    study, folder = written
    text = (folder / "report.md").read_text()
    rows = tables.rows(study.results)
    for protocol, title in plots.TITLES.items():
        part = text.split(f"## {title}\n")[1].split("\n## ")[0]
        for (encoding, _), cell in tables.summary(rows, protocol).items():
            (line,) = re.findall(rf"^\| {encoding} .*$", part, flags=re.M)
            assert f" {cell.text()} " in line
        assert re.search(r"\| tokens scored +\| +[\d,]+ \| +[\d,]+ \|", part)
        assert "16 L / 1 L" in part


def test_the_report_says_what_was_run(written):
    study, folder = written
    text = (folder / "report.md").read_text()
    for fact in (
        study.facts["command"],
        "ab" * 32,
        "1,000,000 bytes",
        "Seeds: 0, 1",
        "Python 3.x, JAX 0.x",
        "2 cores, beads",
        "350 steps of 32 rows of 64 bytes",
        "812,345",
        "41*",
        "What learned does <past> \\| it.",
        "sinusoidal, learned without the memory protocol: absolute positions",
        "early-token effect",
        "not comparable in absolute terms",
        "table 2",
        "table 3",
    ):
        assert fact in text, fact


class Reader(HTMLParser):
    """Collects cells, pictures and whatever would be fetched from elsewhere."""

    def __init__(self):
        super().__init__()
        self.open, self.images, self.cells, self.foreign = [], [], 0, []

    def handle_starttag(self, tag, attributes):
        attributes = dict(attributes)
        if tag == "img":
            self.images.append(attributes["src"])
        elif tag != "meta":
            self.open.append(tag)
        if tag in ("link", "script") or "href" in attributes:
            self.foreign.append(tag)
        self.cells += tag == "td"

    def handle_endtag(self, tag):
        assert self.open.pop() == tag


def test_the_html_is_whole_and_needs_no_other_file(written):
    _, folder = written
    text = (folder / "report.html").read_text()
    reader = Reader()
    reader.feed(text)
    assert reader.open == [] and reader.foreign == []
    kind, first = reader.images[0].split(",")
    assert kind == "data:image/png;base64"
    assert base64.b64decode(first) == (folder / "extrapolation.png").read_bytes()
    assert len(reader.images) == 2
    assert "What learned does &lt;past&gt; | it." in text
    # As many cells as the Markdown has.
    lines = (folder / "report.md").read_text().splitlines()
    bodies = [x for x in lines if x.startswith("| ") and "---" not in x]
    heads = sum("---" in x for x in lines)
    cells = [len(re.split(r"(?<!\\)\|", x)) - 2 for x in bodies]
    headers = [
        len(x.split("|")) - 2 for x in lines if x.startswith("| ") and "---" in x
    ]
    assert heads == len(headers) == text.count("<table>")
    assert reader.cells == sum(cells) - sum(headers)


def test_writing_twice_gives_the_same_bytes(written, tmp_path):
    study, folder = written
    for path in extrapolation.write(study, tmp_path):
        assert path.read_bytes() == (folder / path.name).read_bytes(), path.name


def test_a_study_of_one_protocol_has_a_report(tmp_path):
    study = made_up.study(encodings=("learned", "rope"), protocols=("memory",))
    names = {path.name for path in extrapolation.write(study, tmp_path)}
    assert "loss_by_position.png" not in names
    text = (tmp_path / "report.md").read_text()
    assert "loss_by_position" not in text and "Sliding window" not in text
    assert "one seed, so no spread is known" in text


def test_curves_are_the_rows_and_the_worst_do_not_flatten_the_rest():
    rows = tables.rows(made_up.study().results)
    figure = plots.extrapolation(rows)
    assert [axes.get_title() for axes in figure.axes] == list(plots.TITLES.values())
    panel = figure.axes[0]
    assert panel.get_xscale() == "log"
    line = {line.get_label(): line for line in panel.get_lines()}["rope"]
    cells = tables.summary(rows, "non_overlapping")
    expected = [cells["rope", length].mean for length in made_up.LENGTHS]
    np.testing.assert_allclose(line.get_ydata(), expected)
    assert panel.get_ylim()[1] - panel.get_ylim()[0] < 3
    styles = {(s["color"], s["marker"]) for s in plots.style("abcdefghijkl").values()}
    assert len(styles) == 12


def test_no_rows_no_plot():
    with pytest.raises(ValueError, match="no results"):
        plots.extrapolation([])
    with pytest.raises(ValueError, match="no non-overlapping"):
        plots.loss_by_position(made_up.study(protocols=("memory",)).results)


def test_bins_keep_every_target():
    tokens = np.array([3, 1, 0, 2, 5, 5, 5, 5, 7])
    nll = np.arange(9) * tokens * np.log(2)
    place, loss = plots.binned(nll, tokens)
    # Alone in their bins: contexts 1, 2 and 4. Context 3 has no target.
    assert place[:3].tolist() == [1, 2, 4]
    np.testing.assert_allclose(loss[:3], [0, 1, 3])
    assert (np.diff(place) > 0).all()


def test_parts_as_text():
    parts = [
        document.Heading("A", 1),
        document.Code("x\ny"),
        document.Items(("p", "q")),
        document.Table(("h", "n"), (("a|b", "1"),)),
        document.Image("p.png", "seen"),
    ]
    assert markdown.render(parts) == (
        "# A\n\n```\nx\ny\n```\n\n- p\n- q\n\n"
        "| h    |   n |\n| ---- | --: |\n| a\\|b |   1 |\n\n![seen](p.png)\n"
    )
    with pytest.raises(KeyError, match="p.png"):
        html.render(parts, {})

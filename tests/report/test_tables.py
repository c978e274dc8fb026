import math

import pytest

from relpos_jax.report import published, tables
from relpos_jax.report.document import Table
from tests.report import made_up


def row(encoding="rope", seed=0, length=64, bits=2.0, tokens=100):
    return tables.Row(encoding, seed, "sliding", 64, length, bits, 2.0**bits, tokens)


def test_csv_has_the_columns_and_comes_back_exactly(tmp_path):
    rows = tables.rows(made_up.study(seeds=(0, 1)).results)
    path = tmp_path / "results.csv"
    path.write_text(tables.to_csv(rows))
    assert path.read_text().splitlines()[0] == (
        "encoding,seed,protocol,train_length,length,bits_per_byte,perplexity,tokens"
    )
    assert tables.read_csv(path) == rows
    # 8 encodings, 4 protocols, 8 lengths, less the memory of two absolute ones.
    assert len(rows) == 2 * (8 * 4 - 2) * 8


def test_csv_of_something_else_is_refused(tmp_path):
    path = tmp_path / "other.csv"
    path.write_text("encoding,loss\nrope,1\n")
    with pytest.raises(ValueError, match="has the columns"):
        tables.read_csv(path)


def test_infinite_perplexity_comes_back(tmp_path):
    path = tmp_path / "results.csv"
    path.write_text(tables.to_csv([row()._replace(perplexity=math.inf)]))
    assert tables.read_csv(path)[0].perplexity == math.inf


def test_seeds_become_mean_and_sample_deviation():
    rows = [row(seed=seed, bits=bits) for seed, bits in enumerate((2.0, 2.1, 2.5))]
    (cell,) = tables.summary(rows, "sliding").values()
    assert cell.mean == pytest.approx(2.2)
    assert cell.deviation == pytest.approx(0.264575)
    assert cell.text() == "2.200 ± 0.265"
    assert tables.Cell.of([2.2]).text() == "2.200"


def test_growth_is_paired_by_seed():
    rows = [
        row(seed=0, bits=2.0),
        row(seed=0, bits=3.0, length=1024),
        row(seed=1, bits=4.0),
        row(seed=1, bits=6.0, length=1024),
        row(encoding="t5", seed=0, bits=4.0),
    ]
    assert tables.growth(rows, "sliding", 16) == {"rope": tables.Cell(1.5, 0.0)}


def test_table_shows_every_encoding_length_and_count():
    rows = [
        row(bits=2.0),
        row(bits=3.0, length=1024),
        row(encoding="t5", bits=2.5, tokens=90),
    ]
    table = tables.by_length(rows, "sliding")
    assert table.header == ("encoding", "64 (1 L)", "1024 (16 L)", "16 L / 1 L")
    assert table.rows == (
        ("rope", "2.000", "3.000", "1.500"),
        ("t5", "2.500", "–", "–"),
        ("tokens scored", "90–100", "100", ""),
    )


def test_a_protocol_without_results_is_refused():
    with pytest.raises(ValueError, match="'memory'"):
        tables.by_length([row()], "memory")


def test_a_ragged_table_is_refused():
    with pytest.raises(ValueError, match="row of 1 cells"):
        Table(("a", "b"), (("1",),))


def test_published_figures_are_those_of_the_paper():
    table = published.ALIBI_512.table()
    assert dict(zip(table.header, table.rows[1], strict=True))["1512"] == "25.99"
    assert table.rows[2][-1] == "–"
    for figures in (published.ALIBI_512, published.ALIBI_1024):
        assert "table" in figures.source
        assert min(figures.perplexity) == figures.train_length
        widths = {len(values) for values in figures.perplexity.values()}
        assert widths == {len(figures.encodings)}
        # ALiBi stays flat and the sinusoidal embeddings do not.
        last = figures.perplexity[max(figures.perplexity)]
        assert last[0] > 300 and last[3] < 19

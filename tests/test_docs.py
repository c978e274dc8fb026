"""Every registered encoding has a page, an independent test and a place in a config."""

import re
from pathlib import Path

import pytest

from configs import encodings as study
from configs import quick
from relpos_jax import config as configs
from relpos_jax.evaluation.extrapolation import plan_study
from relpos_jax.positional import ENCODINGS
from relpos_jax.report import encoding_table

ROOT = Path(__file__).resolve().parents[1]
DOCS = ROOT / "docs" / "encodings"
PAGES = sorted(path.stem for path in DOCS.glob("*.md"))
# NoPE is the base class: the plain formula in tests/attention is what it is tested by.
ORACLES = [
    *(ROOT / "tests" / "positional").glob("test_*.py"),
    *(ROOT / "tests" / "attention").glob("test_*.py"),
    *(ROOT / "relpos_jax" / "interop" / "parity").glob("*.py"),
]


@pytest.mark.parametrize("name", ENCODINGS)
def test_has_a_page(name):
    page = encoding_table.page_of(name, PAGES)
    assert page, (
        f"{name!r} has no page: write docs/encodings/{name}.md, or one whose name it "
        f"begins with, or name it in relpos_jax.report.encoding_table.PAGES"
    )
    text = (DOCS / f"{page}.md").read_text(encoding="utf-8")
    assert f"`{name}`" in text or page == name, f"{page}.md does not mention `{name}`"


@pytest.mark.parametrize("name", ENCODINGS)
def test_has_an_independent_test(name):
    kind = type(ENCODINGS[name])
    module = kind.__module__.rpartition(".")[2]
    if module == "protocol":
        return
    word = re.compile(rf"\b{kind.__name__}\b|[\"']{re.escape(name)}[\"']")
    found = [path for path in ORACLES if word.search(path.read_text(encoding="utf-8"))]
    assert found, (
        f"nothing in tests/positional or relpos_jax/interop/parity compares {name!r} "
        f"({kind.__name__}) with something independent: write "
        f"tests/positional/test_{module}.py"
    )


@pytest.mark.parametrize("name", ENCODINGS)
def test_has_a_place_in_a_config(name):
    run = configs.build(quick.get_config(name))
    assert run.model.position == ENCODINGS[name]


def test_the_study_of_all_has_each_of_them():
    plan = plan_study(study.get_config("smoke"))
    assert list(plan.runs) == list(ENCODINGS)


@pytest.mark.parametrize("name", ENCODINGS)
def test_has_a_picture(name):
    file = DOCS / "figures" / f"{name}.png"
    assert file.is_file(), (
        f"draw it: python -m experiments.encoding_pictures "
        f"--out=docs/encodings/figures --names={name}"
    )
    assert file.stat().st_size < 60_000


def test_the_table_is_up_to_date():
    document = (DOCS / "index.md").read_text(encoding="utf-8")
    written = document.split(encoding_table.BEGIN)[1].split(encoding_table.END)[0]

    def without_measurements(text):
        return [line.rsplit(" | ", 1)[0] for line in text.strip().splitlines()]

    wanted = encoding_table.table(PAGES)
    assert without_measurements(written) == without_measurements(wanted), (
        "run python -m experiments.encoding_table"
    )


@pytest.mark.parametrize(
    "page", sorted(ROOT.glob("docs/**/*.md")), ids=lambda x: x.name
)
def test_links_lead_somewhere(page):
    text = re.sub(r"```.*?```", "", page.read_text(encoding="utf-8"), flags=re.S)
    for target in re.findall(r"\]\(([^)#\s]+)", text):
        if not target.startswith(("http://", "https://")):
            assert (page.parent / target).exists(), f"{page.name}: {target}"

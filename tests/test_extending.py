"""The walk-through of docs/extending.md runs as it stands there."""

import re
from pathlib import Path

import jax.numpy as jnp
import pytest

from relpos_jax.positional import ENCODINGS

PAGE = Path(__file__).resolve().parents[1] / "docs" / "extending.md"


@pytest.fixture
def registry():
    before = dict(ENCODINGS)
    yield ENCODINGS
    ENCODINGS.clear()
    ENCODINGS.update(before)


def test_the_page_runs(registry, tmp_path):
    blocks = re.findall(r"^```python\n(.*?)^```", PAGE.read_text("utf-8"), re.M | re.S)
    assert len(blocks) == 5
    code = [line for line in blocks[0].splitlines() if line.strip()]
    assert len(code) <= 30, f"the walk-through's encoding has {len(code)} lines"
    names = {"workdir": str(tmp_path / "run"), "__name__": "extending"}
    for number, block in enumerate(blocks, start=1):
        exec(compile(block, f"extending.md, block {number}", "exec"), names)
    assert "stairs" in registry
    for distance, wanted in ((0, 0), (1, 1), (2, 1), (3, 2), (4000, 11), (-5, 0)):
        assert int(names["stair"](jnp.asarray([distance]), 12)[0]) == wanted

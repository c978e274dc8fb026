"""Parity with independent implementations, and the engine that measures it."""

import json
from pathlib import Path

import jax.numpy as jnp
import numpy as np
import pytest

from relpos_jax.interop import parity
from relpos_jax.interop.parity import cases

GOLDEN = Path(__file__).resolve().parents[3] / "shared" / "golden"
NAMES = sorted(file.stem for file in GOLDEN.glob("*.npz")) or ["none here"]


@pytest.fixture(scope="module")
def golden(shared):
    return {case.name: case for case in parity.load(shared / "golden")}


@pytest.mark.parametrize("name", NAMES)
def test_golden(golden, name):
    row = parity.check(golden[name])
    if row.verdict == "not covered":
        pytest.skip("no adapter covers this case yet")
    assert row.verdict == "pass", row
    assert row.detail == "", row


def write(folder, name, group="doubles", tolerance="1e-3", out=None, **arrays):
    """Writes a case whose adapter doubles `in.x`."""
    x = np.arange(1, 7, dtype=np.float32).reshape(2, 3)
    arrays = {"in.x": x, "out.y": 2 * x if out is None else out, **arrays}
    np.savez(folder / f"{name}.npz", **arrays)
    meta = {"group": group, "source": "a test", "config": {"by": 2}}
    meta["tolerance"] = tolerance
    (folder / f"{name}.json").write_text(json.dumps(meta))


@pytest.fixture
def adapters(monkeypatch):
    """Only this file's adapters."""
    monkeypatch.setattr(cases, "ADAPTERS", [])

    @parity.covers("doubles", source="test", arrays=("in.?",), config=("by",))
    def doubles(case):
        yield "out.y", case["in.x"] * case.config["by"], case["out.y"]
        if "out.z" in case:
            yield "out.z", case["in.x"], case["out.z"], 1.0

    @parity.covers("raises")
    def raises(case):
        yield "out.y", case["in.nothing"], case["out.y"]

    @parity.covers("silent")
    def silent(case):
        yield from ()


def verdicts(folder):
    return {row.case: row for row in map(parity.check, parity.load(folder))}


def test_engine_tells_apart(tmp_path, adapters):
    right = 2 * np.arange(1, 7, dtype=np.float32).reshape(2, 3)
    off = right + np.float32(0.1) * (right == 6)
    write(tmp_path, "good")
    write(tmp_path, "near", out=right * 1.0005)
    write(tmp_path, "off", out=off)
    write(tmp_path, "shape", out=right[:1])
    write(tmp_path, "broadcasts", out=right[:, :1])
    write(tmp_path, "nan", out=right * np.nan)
    write(tmp_path, "equal", tolerance="exact (integers)")
    write(tmp_path, "unequal", tolerance="exact", out=right * 1.0005)
    write(tmp_path, "unknown", group="other")
    write(tmp_path, "raises", group="raises")
    write(tmp_path, "silent", group="silent")
    write(tmp_path, "vague", tolerance="close enough")
    rows = verdicts(tmp_path)
    found = {name: row.verdict for name, row in rows.items()}
    assert found == {
        "good": "pass",
        "near": "pass",
        "off": "fail",
        "shape": "fail",
        "broadcasts": "fail",
        "nan": "fail",
        "equal": "pass",
        "unequal": "fail",
        "unknown": "not covered",
        "raises": "error",
        "silent": "error",
        "vague": "error",
    }
    assert rows["off"].error == pytest.approx(0.1, rel=1e-3)
    assert "[0, 2]" in rows["off"].detail and "out.y" in rows["off"].detail
    assert "(2, 3) instead of (1, 3)" in rows["shape"].detail
    assert "in.nothing" in rows["raises"].detail


def test_each_array_has_its_own_tolerance(tmp_path, adapters):
    x = np.arange(1, 7, dtype=np.float32).reshape(2, 3)
    write(tmp_path, "wide", **{"out.z": x + 1.5})
    write(tmp_path, "left", **{"out.w": x})
    rows = verdicts(tmp_path)
    assert rows["wide"].verdict == "pass" and rows["wide"].tolerance == 1
    assert rows["left"].verdict == "pass"
    assert rows["left"].detail == "not compared: out.w"


@pytest.mark.parametrize(
    "text, word, absolute, relative",
    [
        ("2e-5", "", 2e-5, 2e-5),
        ("3e-5 losses and hidden, 1e-4 gradients", "losses", 3e-5, 3e-5),
        ("3e-5 losses and hidden, 1e-4 gradients", "gradients", 1e-4, 1e-4),
        ("exact (table look-up)", "", 0, 0),
        ("exact integers (float32 log + ceil inside)", "", 0, 0),
        ("2e-7 relative", "", 0, 2e-7),
        ("inv_freq 2e-6 relative; attention_scaling 1e-6", "attention", 1e-6, 1e-6),
        ("2e-6 for positions < 100; 1.2e-7*position above", "above", 1.2e-7, 1.2e-7),
        ("1e-4 (sum of d/2 cosines times up to H/8)", "", 1e-4, 1e-4),
    ],
)
def test_tolerance_is_read_from_the_text(text, word, absolute, relative):
    case = parity.Case("a", {}, {}, {"tolerance": text})
    assert case.tolerance(word) == (absolute, relative)


def test_unknown_clause_is_an_error():
    case = parity.Case("a", {}, {}, {"tolerance": "1e-5 losses"})
    with pytest.raises(ValueError, match="gradients"):
        case.tolerance("gradients")


def test_folders_without_cases_are_errors(tmp_path):
    with pytest.raises(ValueError, match="no such folder"):
        parity.load(tmp_path / "nowhere")
    with pytest.raises(ValueError, match="no golden cases"):
        parity.load(tmp_path)
    np.savez(tmp_path / "alone.npz", x=np.zeros(2))
    with pytest.raises(ValueError, match="alone.json"):
        parity.load(tmp_path)
    (tmp_path / "alone.json").write_text("[]")
    with pytest.raises(ValueError, match="does not describe a case"):
        parity.load(tmp_path)


def test_linear_is_as_in_torch():
    weight = np.arange(6, dtype=np.float32).reshape(2, 3)
    case = parity.Case("a", {}, {"w.f.weight": weight}, {})
    np.testing.assert_allclose(case.linear("f", jnp.ones((1, 3))), [[3, 12]])
    case.arrays["w.f.bias"] = np.float32([1, -1])
    np.testing.assert_allclose(case.linear("f", jnp.ones((1, 3))), [[4, 11]])

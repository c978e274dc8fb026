"""Golden cases: reading a folder of them, choosing adapters, comparing.

A case is `NAME.npz` (arrays named `in.*`, `w.*`, `out.*`, `grad.*`, `aux.*`) beside
`NAME.json` (source, configuration, convention, tolerance). Everything that an adapter
needs to know stands in the JSON or in the arrays; neither names nor sizes of files are
keyed to anything.
"""

import dataclasses
import fnmatch
import json
import re
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

NUMBER = re.compile(r"(?<![\w.])\d+(?:\.\d+)?(?:e[-+]?\d+)?(?!\w)")


class Tolerance(NamedTuple):
    """Allowed is `|ours - expected| <= absolute + relative * |expected|`.

    Attributes:
      absolute, relative: numbers, or arrays that broadcast to the result.
    """

    absolute: Any
    relative: Any


EXACT = Tolerance(0.0, 0.0)


@dataclasses.dataclass(frozen=True)
class Case:
    """One golden case.

    Attributes:
      name: the file's name; for people only.
      config: the source's configuration.
      arrays: all arrays by name.
      meta: the whole of the JSON.
      folder: where the case was read, for those with more files beside them.
    """

    name: str
    config: dict
    arrays: dict[str, np.ndarray]
    meta: dict
    folder: Path | None = None

    def __contains__(self, name: str) -> bool:
        return name in self.arrays

    def __getitem__(self, name: str) -> jax.Array:
        if name not in self.arrays:
            raise KeyError(
                f"case {self.name!r} has no array {name!r}; "
                f"it has {', '.join(sorted(self.arrays))}"
            )
        return jnp.asarray(self.arrays[name])

    def names(self, pattern: str) -> list[str]:
        """Returns the names of the arrays that match a shell pattern, sorted."""
        return sorted(fnmatch.filter(self.arrays, pattern))

    def meaning(self, name: str) -> str:
        """Returns what the JSON says of an array."""
        return self.meta.get("arrays", {}).get(name, {}).get("meaning", "")

    def linear(self, name: str, x: jax.Array) -> jax.Array:
        """Returns `x W^T + b` with the source's weights `w.NAME.weight` and `.bias`."""
        y = x @ self[f"w.{name}.weight"].T
        bias = f"w.{name}.bias"
        if bias not in self:
            return y
        return y + jnp.broadcast_to(self[bias], y.shape)

    def tolerance(self, word: str = "") -> Tolerance:
        """Returns what the JSON's tolerance says, or its clause with `word` in it.

        Clauses end at a comma or a semicolon. "exact" is equality; a clause that says
        "relative" allows no absolute error; otherwise both are the clause's number.

        Raises:
          ValueError: there is no such clause, or it states no number.
        """
        text = str(self.meta.get("tolerance", ""))
        clauses = [part for part in re.split("[;,]", text) if word in part]
        found = NUMBER.search(clauses[0]) if clauses else None
        if clauses and clauses[0].strip().startswith("exact"):
            return EXACT
        if found is None:
            raise ValueError(
                f"case {self.name!r}: the tolerance {text!r} states no number"
                f"{f' for {word!r}' if word else ''}"
            )
        number = float(found[0])
        return Tolerance(0.0 if "relative" in clauses[0] else number, number)


Adapter = Callable[[Case], Iterator[tuple]]
ADAPTERS: list[tuple[Callable[[Case], bool], Adapter]] = []


def covers(
    group: str = "*",
    *,
    source: str = "",
    arrays: tuple[str, ...] = (),
    config: tuple[str, ...] = (),
    when: Callable[[Case], bool] | None = None,
) -> Callable[[Adapter], Adapter]:
    """Registers an adapter for the cases of which all of this is true.

    The adapter is a generator that yields `(array name, ours, expected)`, or with a
    fourth element the tolerance for this array: a `Tolerance`, or a number or array for
    both of its parts. All adapters that cover a case run.

    Args:
      group: shell pattern for the JSON's group.
      source: text in the JSON's source.
      arrays: shell patterns, each for at least one array.
      config: keys of the configuration.
      when: any further condition.
    """

    def fits(case: Case) -> bool:
        return (
            fnmatch.fnmatch(str(case.meta.get("group", "")), group)
            and source in str(case.meta.get("source", ""))
            and all(case.names(pattern) for pattern in arrays)
            and all(key in case.config for key in config)
            and (when is None or when(case))
        )

    def register(adapter: Adapter) -> Adapter:
        ADAPTERS.append((fits, adapter))
        return adapter

    return register


def load(folder: str | Path) -> list[Case]:
    """Reads all cases of a folder, sorted by name.

    Raises:
      ValueError: there is no such folder, it holds no case, or a case's JSON cannot be
        read as one.
    """
    folder = Path(folder)
    if not folder.is_dir():
        raise ValueError(f"no such folder of golden cases: {folder}")
    cases = []
    for file in sorted(folder.glob("*.npz")):
        beside = file.with_suffix(".json")
        if not beside.is_file():
            raise ValueError(f"{file.name} has no {beside.name} beside it in {folder}")
        try:
            meta = json.loads(beside.read_text(encoding="utf-8"))
            config = dict(meta.get("config", {}))
        except (ValueError, AttributeError, TypeError) as error:
            raise ValueError(f"{beside} does not describe a case: {error}") from error
        with np.load(file) as stored:
            arrays = {name: stored[name] for name in stored.files}
        cases.append(Case(file.stem, config, arrays, meta, folder))
    if not cases:
        raise ValueError(
            f"no golden cases in {folder}: expected NAME.npz with NAME.json beside it"
        )
    return cases


class Row(NamedTuple):
    """The verdict on one case.

    Attributes:
      case: its name.
      error: the largest absolute error of the array nearest to (or farthest past) its
        tolerance; NaN where nothing was compared.
      tolerance: the absolute or relative tolerance of that array, whichever is larger.
      verdict: "pass", "fail", "error" (an adapter raised) or "not covered".
      detail: what went wrong, or which results no adapter looked at.
    """

    case: str
    error: float
    tolerance: float
    verdict: str
    detail: str = ""


def check(case: Case) -> Row:
    """Runs every adapter that covers the case and compares what they yield."""
    adapters = [adapter for fits, adapter in ADAPTERS if fits(case)]
    if not adapters:
        return Row(case.name, np.nan, np.nan, "not covered")
    worst, seen, wrong = (-1.0, np.nan, np.nan), set(), []
    try:
        with jax.default_matmul_precision("highest"):
            for adapter in adapters:
                for name, ours, expected, *override in adapter(case):
                    tolerance = override[0] if override else case.tolerance()
                    if not isinstance(tolerance, Tolerance):
                        tolerance = Tolerance(tolerance, tolerance)
                    seen.add(name)
                    share, *found, problem = _compare(ours, expected, tolerance)
                    worst = max(worst, (share, *found), key=lambda one: one[0])
                    if problem:
                        wrong.append(f"{name}: {problem}")
    except Exception as error:
        detail = f"{type(error).__name__}: {error}".splitlines()[0]
        return Row(case.name, *worst[1:], "error", detail)
    if wrong:
        return Row(case.name, *worst[1:], "fail", "; ".join(wrong))
    if not seen:
        return Row(case.name, np.nan, np.nan, "error", "its adapter compared nothing")
    left = sorted({*case.names("out.*"), *case.names("grad.*")} - seen)
    detail = f"not compared: {', '.join(left)}" if left else ""
    return Row(case.name, *worst[1:], "pass", detail)


def _compare(ours, expected, tolerance: Tolerance):
    """Returns the share of the tolerance used, the error, the tolerance, a problem."""
    ours, expected = np.asarray(ours), np.asarray(expected)
    number = float(np.max(np.maximum(tolerance.absolute, tolerance.relative)))
    if ours.shape != expected.shape:
        problem = f"shape {ours.shape} instead of {expected.shape}"
        return np.inf, np.nan, number, problem
    if ours.size == 0:
        return 0.0, 0.0, number, ""
    ours, expected = ours.astype(np.float64), expected.astype(np.float64)
    error = np.abs(ours - expected)
    if not np.all(np.isfinite(error)):
        return np.inf, np.inf, number, "values that are not finite"
    allowed = tolerance.absolute + tolerance.relative * np.abs(expected)
    allowed = np.broadcast_to(allowed, error.shape)
    # An error of 0 uses nothing of any tolerance; else 0 allowed is all used up.
    share = np.where(error > 0, error / np.where(allowed > 0, allowed, 1e-300), 0.0)
    at = np.unravel_index(np.argmax(share), share.shape)
    problem = ""
    if share[at] > 1:
        where = ", ".join(str(int(i)) for i in at)
        problem = f"off by {error[at]:.3g} at [{where}], allowed {allowed[at]:.3g}"
    return float(share[at]), float(error.max()), number, problem

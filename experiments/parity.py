"""Compares our encodings and models with golden cases of other implementations.

    python -m experiments.parity --golden=../shared/golden

Reads every case of a folder (`NAME.npz` with `NAME.json` beside it) and prints for each
the largest error, the tolerance that its JSON states and the verdict. Exits with 1 if
one fails. Takes about a minute on two CPU cores.
"""

import collections
import fnmatch

from absl import app, flags

from relpos_jax.interop import parity

_GOLDEN = flags.DEFINE_string("golden", None, "Folder of golden cases.")
_CASE = flags.DEFINE_string("case", "*", "Shell pattern of the cases to look at.")


def main(argv: list[str]) -> None:
    if len(argv) > 1:
        raise app.UsageError(f"what is {argv[1]!r}? Options look like --name=value.")
    try:
        cases = parity.load(_GOLDEN.value)
    except (ValueError, OSError) as error:
        raise SystemExit(f"error: {error}") from error
    cases = [case for case in cases if fnmatch.fnmatch(case.name, _CASE.value)]
    if not cases:
        raise SystemExit(f"error: no case is called {_CASE.value!r}")
    width = max(len(case.name) for case in cases)
    print(f"{'case':<{width}}  largest error  tolerance  verdict")
    rows = []
    for case in cases:
        row = parity.check(case)
        rows.append(row)
        covered = row.verdict != "not covered"
        error = f"{row.error:.1e}" if covered else "-"
        tolerance = f"{row.tolerance:.0e}" if covered else "-"
        tolerance = "exact" if row.tolerance == 0 else tolerance
        line = f"{row.case:<{width}}  {error:>13}  {tolerance:>9}  {row.verdict}"
        print(f"{line}  {row.detail}".rstrip(), flush=True)
    counts = collections.Counter(row.verdict for row in rows)
    print(", ".join(f"{count} {verdict}" for verdict, count in sorted(counts.items())))
    missing = [row.case for row in rows if row.verdict == "not covered"]
    if missing:
        print(f"not covered: {', '.join(missing)}")
    if counts["fail"] or counts["error"]:
        raise SystemExit(1)


if __name__ == "__main__":
    flags.mark_flags_as_required(["golden"])
    app.run(main)

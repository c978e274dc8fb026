"""Runs peers in turn, each in its own process, and puts results side by side."""

import json
import statistics
import subprocess
import sys
from collections.abc import Sequence

from absl import flags

from relpos_jax.evaluation import environment

ROUNDS = flags.DEFINE_integer("rounds", 7, "Timed runs of each, taken in turn.")
JSON = flags.DEFINE_string("json", None, "Also write the results into this file.")


class Worker:
    """A peer's process; `info` has what it said of itself."""

    def __init__(self, task: str, peer: str, arguments: dict):
        module = "experiments.benchmarks.worker"
        command = [sys.executable, "-m", module, task, peer, json.dumps(arguments)]
        self._process = subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        )
        self.info = self._answer()

    def run(self, count: int) -> dict:
        """Runs it `count` times; returns the seconds of all of them."""
        self._process.stdin.write(f"{count}\n")
        self._process.stdin.flush()
        return self._answer()

    def close(self) -> None:
        """Ends the process."""
        self._process.stdin.close()
        try:
            self._process.wait(timeout=30)
        except subprocess.TimeoutExpired:
            self._process.kill()

    def _answer(self) -> dict:
        line = self._process.stdout.readline()
        if line:
            return json.loads(line)
        code = self._process.wait()
        if code < 0:
            return {"missing": f"was killed by signal {-code}: too little memory?"}
        return {"missing": f"failed with status {code}; its message is above"}


def compare(
    task: str,
    peers: Sequence[str],
    arguments: dict,
    *,
    count: int = 1,
    others: dict[str, dict] | None = None,
) -> tuple[list[dict], dict[str, str]]:
    """Returns a row for each peer, and why others have none.

    A row has the median of the rounds' seconds for one run, and `ratio`: the median,
    over the rounds, of its seconds to those of the first peer in the same round.

    Args:
      task: the function of the peers' modules.
      peers: names, `module:variant`; ratios are to the first that could be measured.
      arguments: of that function.
      count: runs in a round.
      others: more arguments of a peer's module, by its name.
    """
    workers, left_out = {}, {}
    try:
        for peer in peers:
            print(f"starting {peer} …", file=sys.stderr, flush=True)
            more = (others or {}).get(peer.partition(":")[0], {})
            worker = Worker(task, peer, arguments | more)
            workers[peer] = worker
            if "missing" in worker.info:
                left_out[peer] = worker.info["missing"]
                workers.pop(peer).close()
        found = {peer: [] for peer in workers}
        for _ in range(ROUNDS.value):
            for peer, worker in workers.items():
                found[peer].append(worker.run(count))
        infos = {peer: worker.info for peer, worker in workers.items()}
    finally:
        for worker in workers.values():
            worker.close()
    rows, base = [], None
    for peer, answers in found.items():
        failed = [answer["missing"] for answer in answers if "missing" in answer]
        if failed:
            left_out[peer] = failed[0]
            continue
        seconds = [answer["seconds"] / count for answer in answers]
        base = base or seconds
        rows.append(
            {
                "peer": peer,
                "seconds": statistics.median(seconds),
                "cpu_seconds": statistics.median(
                    answer["cpu_seconds"] / count for answer in answers
                ),
                "ratio": statistics.median(
                    mine / first for mine, first in zip(seconds, base, strict=True)
                ),
                **infos[peer],
            }
        )
    return rows, left_out


def write(kind: str, results: list[dict]) -> None:
    """Prints results as Markdown, and writes them as JSON where `--json` says.

    Args:
      kind: a name in `tables.TABLES`.
      results: a dict for each comparison, with its `rows` and `left_out`.
    """
    from experiments.benchmarks import tables

    command = " ".join(["python", "-m", _module(), *sys.argv[1:]])
    document = {
        "kind": kind,
        "command": command,
        "rounds": ROUNDS.value,
        **environment.describe(),
        "versions": versions(),
        "results": results,
    }
    if JSON.value:
        with open(JSON.value, "w", encoding="utf-8") as file:
            json.dump(document, file, indent=1)
    print(tables.markdown(document))


def versions() -> dict[str, str]:
    """Returns the installed versions of what is compared."""
    from importlib import metadata

    found = {}
    for name in ("jax", "flax", "torch", "transformers", "x-transformers"):
        try:
            found[name] = metadata.version(name)
        except metadata.PackageNotFoundError:
            pass
    return found


def _module() -> str:
    spec = sys.modules["__main__"].__spec__
    return spec.name if spec else sys.argv[0]

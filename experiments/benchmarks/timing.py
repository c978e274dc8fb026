"""Times compiled functions in turn, so that a noisy machine disturbs them alike."""

import statistics
import time
from collections.abc import Callable

import jax


def compare(functions: dict[str, Callable], inputs: tuple, *, rounds: int) -> dict:
    """Returns seconds a call (median of rounds taken in turn) and temporary bytes.

    Args:
      functions: what to time, by name; each is compiled before any is timed.
      inputs: arguments, the same for all.
      rounds: calls of each function.
    """
    compiled = {n: jax.jit(f).lower(*inputs).compile() for n, f in functions.items()}
    for function in compiled.values():
        jax.block_until_ready(function(*inputs))
    seconds = {name: [] for name in compiled}
    for _ in range(rounds):
        for name, function in compiled.items():
            start = time.perf_counter()
            jax.block_until_ready(function(*inputs))
            seconds[name].append(time.perf_counter() - start)
    return {
        name: {
            "seconds": statistics.median(seconds[name]),
            "temp_bytes": function.memory_analysis().temp_size_in_bytes,
        }
        for name, function in compiled.items()
    }


def table(results: dict) -> str:
    """Returns the results as a Markdown table, with ratios to the first row."""
    first = next(iter(results.values()))
    lines = [
        "| what | seconds | to the first | temporaries, MiB |",
        "|---|---|---|---|",
    ]
    for name, row in results.items():
        ratio = row["seconds"] / first["seconds"]
        size = row["temp_bytes"] / 2**20
        lines.append(f"| {name} | {row['seconds']:.3f} | {ratio:.2f} | {size:.1f} |")
    return "\n".join(lines)


def ready(function: Callable, inputs: tuple) -> jax.stages.Compiled:
    """Returns the function compiled for these inputs, if it isn't yet."""
    if isinstance(function, jax.stages.Compiled):
        return function
    return jax.jit(function).lower(*inputs).compile()


def against(base: tuple, other: tuple, *, rounds: int) -> dict:
    """Returns the other's seconds, their ratio to the base's, and temporary bytes.

    The ratio is the median of the ratios of pairs of calls made one after the other.

    Args:
      base, other: a function and its inputs each; a base may be compiled already.
      rounds: pairs of calls.
    """
    compiled = [(ready(*pair), pair[1]) for pair in (base, other)]
    for function, inputs in compiled:
        jax.block_until_ready(function(*inputs))
    seconds, ratios = [], []
    for _ in range(rounds):
        pair = []
        for function, inputs in compiled:
            start = time.perf_counter()
            jax.block_until_ready(function(*inputs))
            pair.append(time.perf_counter() - start)
        seconds.append(pair[1])
        ratios.append(pair[1] / pair[0])
    return {
        "seconds": statistics.median(seconds),
        "ratio": statistics.median(ratios),
        "temp_bytes": compiled[1][0].memory_analysis().temp_size_in_bytes,
        "base_temp_bytes": compiled[0][0].memory_analysis().temp_size_in_bytes,
    }

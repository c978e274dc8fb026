"""Prints a device's memory in ring attention as the ring grows.

    python -m experiments.benchmarks.ring --devices=8

On a machine with fewer devices they are simulated: the figures are of the program that
XLA compiled for one of them, and nothing runs.
"""

import os

from absl import app, flags

_DEVICES = flags.DEFINE_integer("devices", 8, "Size of the largest ring, a power of 2.")
_ENCODING = flags.DEFINE_string("encoding", "transformer_xl", "Position encoding.")
_LENGTH = flags.DEFINE_integer("length", 8192, "Queries, in all devices together.")
_MEMORY = flags.DEFINE_integer("memory", 2048, "Keys before them.")


def main(argv: list[str]) -> None:
    if len(argv) > 1:
        raise app.UsageError(f"what is {argv[1]!r}? Options look like --name=value.")
    simulated = f" --xla_force_host_platform_device_count={_DEVICES.value}"
    os.environ["XLA_FLAGS"] = os.environ.get("XLA_FLAGS", "") + simulated
    from experiments.benchmarks import rings  # JAX must not start before the flags

    print("| ring | temporaries a device | arguments a device |")
    print("|---|---|---|")
    size = 1
    while size <= _DEVICES.value:
        cost = rings.cost(_ENCODING.value, size, _LENGTH.value, _MEMORY.value)
        sizes = (f"{x / 2**20:.1f} MiB" for x in cost)
        print(f"| {size} | {' | '.join(sizes)} |", flush=True)
        size *= 2


if __name__ == "__main__":
    app.run(main)

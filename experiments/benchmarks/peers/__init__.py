"""The same work done by others, to be measured in turn with ours.

A peer is named `module:variant`. Its module has a function for each task it can do:
`training(variant, workload)` and `attention(variant, length)`, which return a `Peer`.
Each runs in a process of its own (`experiments.benchmarks.worker`), so that the thread
pools and allocators of two libraries never meet. What a module needs and the
environment lacks raises `Missing`, and the row is left out with that reason.
"""

from collections.abc import Callable
from typing import NamedTuple


class Peer(NamedTuple):
    """Work that can be repeated.

    Attributes:
      run: `run(n)` does it n times and returns when it is finished.
      parameters: of the model; 0 where there is none.
      temporaries: bytes that a compiled program asks for, where a compiler says it.
    """

    run: Callable[[int], None]
    parameters: int = 0
    temporaries: int | None = None


class Missing(Exception):
    """Says what a peer needs and how to get it."""

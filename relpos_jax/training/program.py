"""What the compiled training call of a run costs, without training it."""

import time
from typing import NamedTuple

import jax
import jax.numpy as jnp
from flax import nnx

from relpos_jax import data
from relpos_jax.config import RunConfig
from relpos_jax.training import loop
from relpos_jax.training.objectives import NextToken, Objective
from relpos_jax.training.step import make_train_call
from relpos_jax.where import Where


class ProgramReport(NamedTuple):
    """Times in seconds, sizes in bytes.

    Attributes:
      parameters: numbers in the model.
      trace_seconds: Python's part: from functions to StableHLO.
      compile_seconds: XLA's part.
      state_bytes: parameters, optimiser state, memory and the rest of the state.
      batch_bytes: the stack of batches of a call.
      temporary_bytes: what the program needs beside both while it runs.
    """

    parameters: int
    trace_seconds: float
    compile_seconds: float
    state_bytes: int
    batch_bytes: int
    temporary_bytes: int

    def __str__(self) -> str:
        gigabytes = {
            "state": self.state_bytes,
            "batches of a call": self.batch_bytes,
            "temporaries": self.temporary_bytes,
        }
        sizes = ", ".join(f"{name} {x / 1e9:.3f} GB" for name, x in gigabytes.items())
        return (
            f"{self.parameters:,} parameters; traced in {self.trace_seconds:.1f} s, "
            f"compiled in {self.compile_seconds:.1f} s; {sizes}"
        )


def program_report(run: RunConfig, objective: Objective = NextToken()) -> ProgramReport:
    """Compiles a run's training call from shapes alone; allocates nothing.

    For this process's backend, of which sizes and times depend. The persistent cache
    shortens the compilation; turn it off to measure.
    """
    training = run.training
    state = jax.eval_shape(lambda: loop.initial_state(run))
    shape = (training.steps_per_call, training.batch, training.length)
    tokens = jax.ShapeDtypeStruct(shape, jnp.int32)
    weight = jax.ShapeDtypeStruct(shape, jnp.float32)
    stack = data.Batch(tokens, tokens, Where(tokens, tokens), weight)
    graphdef = nnx.split(nnx.eval_shape(lambda: loop.make_model(run)))[0]
    call = make_train_call(graphdef, training, objective)
    keys = loop.step_keys(run.model, training, objective)
    began = time.perf_counter()
    lowered = call.lower(state, stack, jax.ShapeDtypeStruct((), jnp.int32), *keys)
    traced = time.perf_counter()
    compiled = lowered.compile()
    done = time.perf_counter()
    return ProgramReport(
        parameters=sum(leaf.size for leaf in jax.tree.leaves(state.params)),
        trace_seconds=traced - began,
        compile_seconds=done - traced,
        state_bytes=_bytes(state),
        batch_bytes=_bytes(stack),
        temporary_bytes=compiled.memory_analysis().temp_size_in_bytes,
    )


def _bytes(tree) -> int:
    return sum(leaf.size * leaf.dtype.itemsize for leaf in jax.tree.leaves(tree))

"""KERPLE: the authors' logarithmic and power kernels, and NVIDIA NeMo's."""

import jax.numpy as jnp

from relpos_jax import where
from relpos_jax.attention import core
from relpos_jax.interop.parity.cases import Case, covers
from relpos_jax.masks import Causal
from relpos_jax.positional import Params, PositionEncoding
from relpos_jax.positional.kerple import KerpleLog, KerplePower, log_kernel
from relpos_jax.positional.protocol import Block
from relpos_jax.relative import Pairs


def scores(encoding: PositionEncoding, params: Params, logits, q_at, k_at):
    """Returns what the encoding makes of given logits."""
    distance = q_at.position[:, :, None] - k_at.position[:, None, :]
    table = core.heads_first(encoding.table(params, distance), 3)
    visible = Causal()(q_at, k_at)[:, None]
    block = Block(None, None, logits, table, Pairs(), q_at, k_at, 1.0, visible)
    return encoding.score(params, block)


@covers(arrays=("in.logits", "out.logits", "w.p", "w.a"), config=("eps",))
def logarithmic(case: Case):
    logits, params = case["in.logits"], {"p": case["w.p"], "a": case["w.a"]}
    kerple = KerpleLog(eps=case.config["eps"])
    for name in "pa":
        if f"out.{name}_clamped" in case:
            ours = kerple.value_of(params, name)[:, None, None]
            yield f"out.{name}_clamped", ours, case[f"out.{name}_clamped"]
    at = where.contiguous(logits.shape[0], logits.shape[2])
    yield "out.logits", scores(kerple, params, logits, at, at), case["out.logits"]
    distance = jnp.maximum(at.position[0][:, None] - at.position[0][None, :], 0)
    if "aux.bias_float64" in case:
        bias = scores(kerple, params, jnp.zeros_like(logits), at, at)[0]
        yield "aux.bias_float64", bias, case["aux.bias_float64"]
    if "out.logits_last_query" in case:
        last = at._replace(position=at.position[:, -1:], segment=at.segment[:, -1:])
        ours = scores(kerple, params, logits[:, :, -1:], last, at)
        yield "out.logits_last_query", ours, case["out.logits_last_query"]
    if "out.nemo_bias" in case:
        exponent = case["in.nemo_p"].reshape(-1)
        ours = log_kernel(distance, params["p"], params["a"], exponent)
        yield "out.nemo_bias", jnp.moveaxis(ours, -1, 0), case["out.nemo_bias"]


@covers(source="ParallelKerplePower", arrays=("in.logits",), config=("pos_emb", "eps"))
def power(case: Case):
    logits = case["in.logits"]
    # Which parameters there are is in the name: kerple_power_<bias>_<weight>.
    parts = case.config["pos_emb"].split("_")[-2:]
    bias, weight = ("" if part == "nn" else part for part in parts)
    kerple = KerplePower(bias=bias, weight=weight, eps=case.config["eps"])
    params = {
        name: case[f"w.{name.replace('weight', 'wei')}"] for name in kerple.ranges()
    }
    at = where.contiguous(logits.shape[0], logits.shape[2])
    yield "out.logits", scores(kerple, params, logits, at, at), case["out.logits"]

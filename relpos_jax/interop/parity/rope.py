"""Rotary embeddings: frequencies, tables and rotated vectors, stretched and plain."""

import re

import jax.numpy as jnp
import numpy as np

from relpos_jax import where
from relpos_jax.attention import core
from relpos_jax.interop.parity.cases import Case, Tolerance, covers
from relpos_jax.positional.rope import Rope, rotate
from relpos_jax.positional.rope_checkpoint import rope_from_config, scaling_from_dict
from relpos_jax.positional.rope_frequencies import (
    inverse_frequencies,
    yarn_attention_factor,
)
from relpos_jax.positional.rope_scaling import RopeScaling
from relpos_jax.positional.xpos import Xpos, xpos_rates, xpos_scales
from relpos_jax.where import Where

# A float32 frequency is rounded when it is made and its angle when it is multiplied, at
# 6e-8 each, in the source and here: "about 2.5e-7 * position", as the data set has it.
GROWTH = 2.5e-7


def lengths_of(lengths) -> jnp.ndarray | None:
    """Returns the lengths as an array, or None where the source was given none."""
    return None if None in lengths else jnp.asarray(lengths, jnp.int32)


def tables(position, frequency, amplitude=1.0):
    """Returns cosines and sines, each twice over: `[t d]`, by turning unit vectors.

    The adapters give it the source's own frequencies, which they compare for
    themselves: float32 frequencies that differ in the last bit are already farther
    apart at position 1000 than the tables may be.
    """
    planes = frequency.shape[-1]
    shape = (1, len(position), 1, planes)
    unit = jnp.concatenate([jnp.ones(shape), jnp.zeros(shape)], axis=-1)
    at = jnp.asarray(position)[None]
    turned = rotate(unit, at, frequency, amplitude=float(amplitude))[0, :, 0]
    cosine, sine = turned[:, :planes], turned[:, planes:]
    return tuple(jnp.concatenate([x, x], axis=-1) for x in (cosine, sine))


def by_position(case: Case, position, *, ours: float = 0.0) -> Tolerance:
    """Returns the tolerance of angles for results `[.. t d]`.

    Looser at far positions where the JSON says so. What our own frequencies turned has
    their rounding multiplied by every position, and by the size of what was turned:
    for that, `ours` is the largest feature.
    """
    text, position = str(case.meta["tolerance"]), np.asarray(position)
    near = case.tolerance("cos") if "cos" in text else case.tolerance()
    allowed = np.full(position.shape, near.absolute)
    if "max position" in text:
        limit = int(re.search(r"< (\d+)", text)[1])
        far = case.tolerance("max position").absolute * position.max()
        allowed = np.where(position < limit, allowed, far)
    allowed = np.maximum(allowed, GROWTH * position * ours)
    return Tolerance(allowed[..., None], near.relative)


@covers("rope", arrays=("out.inv_freq.*", "out.attention_scaling.*"))
def frequencies(case: Case):
    for key, config in case.config.items():
        rope = rope_from_config(config)
        wanted = case[f"out.inv_freq.{key}"]
        ours, factors = [], []
        for length in config["seq_lens"]:
            length = lengths_of([length])
            found = rope.frequencies(config["head_dim"], length)
            ours.append(found.reshape(found.shape[-1:]))
            factors.append(rope.scaling.amplitude(length) if rope.scaling else 1.0)
        yield f"out.inv_freq.{key}", jnp.stack(ours), wanted, case.tolerance("inv_freq")
        name = f"out.attention_scaling.{key}"
        yield name, jnp.asarray(factors), case[name], case.tolerance("attention")


@covers("rope", source="dynamic_rope_update", config=("seq_lens", "factor"))
def dynamic_history(case: Case):
    # The source remembers: the longest length so far is in force until a call shorter
    # than the original length. Ours is a function of the length; so keep the memory
    # here.
    config, in_force, longest = case.config, [], 0
    original = config["max_position_embeddings"]
    for length in np.asarray(case["in.seq_lens"]):
        longest = length if length > longest or length < original else longest
        in_force.append(int(longest))
    scaling = {"rope_type": "dynamic", "factor": config["factor"]}
    rope = rope_from_config(config | {"rope_scaling": scaling})
    ours = rope.frequencies(config["head_dim"], lengths_of(in_force))
    yield "out.inv_freq", ours, case["out.inv_freq"]


@covers("rope", arrays=("out.table", "in.position_ids"), config=("rotary_dim",))
def interleaved(case: Case):
    config = case.config
    fraction = config["rotary_dim"] / config["head_dim"]
    base = float(config.get("theta", 10000))
    rope = Rope(layout="interleaved", fraction=fraction, base=base)
    at = Where(case["in.position_ids"], jnp.ones_like(case["in.position_ids"]))
    for name, hook in (("q", rope.query), ("k", rope.key)):
        x, expected = case[f"in.{name}"], case[f"out.{name}"]
        largest = float(jnp.abs(x).max())
        allowed = by_position(case, at.position[:, :, None], ours=largest)
        yield f"out.{name}", hook({}, x, at), expected, allowed
    rows, width = case.arrays["out.table"].shape
    cosine, sine = tables(np.arange(rows), rope.frequencies(config["head_dim"]))
    half = width // 2
    table = jnp.concatenate([sine[:, :half], cosine[:, :half]], axis=-1)
    yield "out.table", table, case["out.table"]


def rope_of(config: dict) -> Rope:
    """Returns the rotary embedding of a rotated case, whose keys are the data set's."""
    scaling = config.get("rope_scaling")
    if scaling is None and "short_factor" in config:
        names = ("short_factor", "long_factor")
        scaling = {"rope_type": "longrope"} | {name: config[name] for name in names}
    rotated = config.get("rotary_dim", config["head_dim"])
    return rope_from_config(
        config
        | {
            "rope_theta": config.get("theta", 10000.0),
            "partial_rotary_factor": rotated / config["head_dim"],
            "rope_scaling": scaling,
        }
    )


@covers("rope", arrays=("in.q", "in.position_ids", "out.cos*", "out.q*"))
def rotated(case: Case):
    for name in case.names("out.q*"):
        yield from _rotated(case, name.removeprefix("out.q"))


def _rotated(case: Case, ending: str):
    """Compares one call; `ending` says in which regime, where there are two."""
    config, rope = case.config, rope_of(case.config)
    position = case["in.position_ids"]
    seen = config.get("seq_len_seen", int(position.max()) + 1)
    if ending:
        original = config["original_max_position_embeddings"]
        seen = original + 1 if ending == "_long" else original
    length = jnp.full(position.shape, seen, jnp.int32)
    frequency = rope.frequencies(config["head_dim"], length)
    frequency = frequency.reshape(-1, frequency.shape[-1])[0]
    amplitude = rope.scaling.amplitude(length) if rope.scaling else 1.0
    if "out.attention_scaling" in case:
        name = "out.attention_scaling"
        yield name, amplitude, case[name], case.tolerance("inv_freq").relative

    name = f"out.inv_freq{ending}"
    clause = "inv_freq" if "inv_freq" in str(case.meta["tolerance"]) else ""
    yield name, frequency, case[name], case.tolerance(clause)
    for row, at in enumerate(position):
        cosine, sine = tables(at, case[name], amplitude)
        allowed = by_position(case, at)
        for word, ours in (("cos", cosine), ("sin", sine)):
            table = f"out.{word}{ending}"
            yield table, ours, case[table][row], allowed

    at = Where(position, jnp.ones_like(position))
    params = {"query_length": length, "key_length": length}
    for word, hook in (("q", rope.query), ("k", rope.key)):
        x, given = _swap(case[f"in.{word}"]), f"out.{word}{ending}"
        turned = rotate(x, position, case[name], amplitude=float(amplitude))
        allowed = by_position(case, position[:, None])
        yield given, _swap(turned), case[given], allowed
        # And by our own frequencies.
        largest = float(amplitude * jnp.abs(x).max())
        allowed = by_position(case, position[:, None], ours=largest)
        yield given, _swap(hook(params, x, at)), case[given], allowed
    if "out.scores" in case:
        # Of vectors turned by the source's frequencies: the distances are short, but
        # the positions are not.
        turned = (rotate(_swap(case[f"in.{x}"]), position, case[name]) for x in "qk")
        scores = jnp.einsum("bqhd,bkhd->bhqk", *turned)
        yield "out.scores", scores, case["out.scores"]


def _swap(x):
    """Swaps the axes of heads and time."""
    return jnp.swapaxes(x, 1, 2)


def _yarn_repository(source: str, config: dict) -> tuple[RopeScaling, int | None]:
    """Returns the scaling of a class of the YaRN authors' code, and the length.

    Its dynamic classes leave calls up to `max_position_embeddings` as they are.
    """
    seen, maximum = config["forward_seq_len"], config["max_position_embeddings"]
    length = seen if seen > maximum else None
    original = config.get("original_max_position_embeddings", maximum)
    scale = float(config.get("scale", config.get("alpha", 1)))
    stretched = {"original_length": original, "dynamic": True}
    name = source.rpartition("/")[2]
    if name == "LlamaDynamicScaledRotaryEmbedding":
        factor = float(config.get("ntk", 0))
        if factor:
            return RopeScaling("dynamic_ntk", factor, original), length
        return RopeScaling("linear", **stretched), length
    kinds = {"LinearScaled": "linear", "PartNTK": "part_ntk", "YaRN": "yarn"}
    kind = next((kind for part, kind in kinds.items() if part in name), "ntk")
    if "Dynamic" in name:
        return RopeScaling(kind, **stretched), length
    if kind in ("linear", "ntk"):
        return RopeScaling(kind, scale), None
    if kind == "part_ntk":
        return RopeScaling(kind, scale, original), None
    keys = ("beta_fast", "beta_slow", "attn_factor", "extrapolation_factor")
    given = {key: config[key] for key in keys if key in config}
    scaling = {"rope_type": "yarn", "factor": scale, **given}
    return scaling_from_dict(scaling, original_length=original), None


@covers("rope", source="jquesnelle/yarn", arrays=("in.positions.*",))
def yarn_repository(case: Case):
    for key, config in case.config.items():
        scaling, seen = _yarn_repository(case.meta["source"], config)
        dim, base = config["dim"], float(config["base"])
        length = None if seen is None else jnp.asarray(seen, jnp.int32)
        frequency = scaling.frequencies(dim, base, length)
        amplitude = scaling.amplitude(length)
        inverse = frequency
        if scaling.kind == "linear":
            # The source divides the positions; its frequencies stay as they are.
            inverse = inverse_frequencies(dim, base)
        tolerance = case.tolerance("inv_freq")
        yield f"out.inv_freq.{key}", inverse, case[f"out.inv_freq.{key}"], tolerance
        if f"out.mscale.{key}" in case:
            yield f"out.mscale.{key}", amplitude, case[f"out.mscale.{key}"], 1e-6
        position = case[f"in.positions.{key}"]
        allowed = by_position(case, position)
        divided = position
        if scaling.kind == "linear":
            divided = position / scaling.stretch(length)
        cosine, sine = tables(divided, case[f"out.inv_freq.{key}"], amplitude)
        yield f"out.cos.{key}", cosine, case[f"out.cos.{key}"], allowed
        yield f"out.sin.{key}", sine, case[f"out.sin.{key}"], allowed


@covers("rope", source="microsoft/LongRoPE", arrays=("in.rescale_factors.*",))
def longrope_repository(case: Case):
    for key, config in case.config.items():
        original = config["original_max_position_embeddings"]
        factor = config["max_position_embeddings"] / original
        yarn = config["magnitude_scaling_policy"] == "yarn"
        factors = tuple(np.asarray(case[f"in.rescale_factors.{key}"]).tolist())
        common = {
            "kind": "longrope",
            "factor": factor,
            "original_length": original,
            "long_factor": factors,
            "attention_factor": yarn_attention_factor(factor) if yarn else None,
        }
        length = jnp.asarray(config["dynamic_seq_len"], jnp.int32)
        position = case[f"in.positions.{key}"]
        for word, scaling in (
            ("static", RopeScaling(short_factor=factors, **common)),
            ("dynamic", RopeScaling(dynamic=True, **common)),
        ):
            frequency = scaling.frequencies(
                config["head_dim"], float(config["base"]), length
            )
            inverse = f"out.{word}.inv_freq.{key}"
            cosine, sine = tables(position, case[inverse], scaling.amplitude())
            allowed = by_position(case, position)
            yield inverse, frequency, case[inverse], case.tolerance("inv_freq")
            for name, ours in (("cos", cosine), ("sin", sine)):
                name = f"out.{word}.{name}.{key}"
                yield name, ours, case[name], allowed
        name = f"out.mscale.{key}"
        yield name, scaling.amplitude(), case[name], 1e-6


@covers(arrays=("in.q", "in.k", "out.q", "out.k"), config=("scale_base", "length"))
def xpos(case: Case):
    config = case.config
    encoding = Xpos(scale_base=float(config["scale_base"]))
    q, k = case["in.q"][:, :, None], case["in.k"][:, :, None]
    batch, length = q.shape[:2]
    at = where.contiguous(batch, length)
    # torchscale centres at half the length rounded up, x-transformers rounded down.
    up = "torchscale" in case.meta["source"]
    centre = -(-length // 2) if up else length // 2
    params = {"centre": jnp.full((batch, 1), centre, jnp.int32)}
    ours_q = encoding.query(params, q, at)
    ours_k = encoding.key(params, k, at)
    yield "out.q", ours_q[:, :, 0], case["out.q"]
    yield "out.k", ours_k[:, :, 0], case["out.k"]
    if "out.q_step" in case:
        last = where.contiguous(batch, 1, start=length - 1)
        step = encoding.query(params, q[:, -1:], last)
        yield "out.q_step", step[:, :, 0], case["out.q_step"]
    # The scores of our own centre, as attention forms them.
    prepared, _, _ = encoding.prepare({}, None, at, at, None)
    operands = core.Operands(
        *(jnp.swapaxes(x, 1, 2) for x in (q, k, k)),
        jnp.swapaxes(encoding.query(prepared, q, at), 1, 2),
        jnp.swapaxes(encoding.key(prepared, k, at), 1, 2),
        None,
        {},
    )
    yield "out.scores", core.content(operands, 1.0)[:, 0], case["out.scores"]
    dim = config["head_dim"]
    if "out.zeta" in case:
        yield "out.zeta", xpos_rates(dim), case["out.zeta"]
    if "out.freqs" in case:
        position = at.position[0].astype(jnp.float32)[:, None]
        angle = position * jnp.asarray(inverse_frequencies(dim, encoding.base))[None]
        yield "out.freqs", jnp.repeat(angle, 2, axis=-1), case["out.freqs"]
    if "out.scale" in case:
        scales = xpos_scales(at.position[:1] - centre, dim, encoding.scale_base)
        yield "out.scale", jnp.repeat(scales[0], 2, axis=-1), case["out.scale"]

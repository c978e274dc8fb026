"""Sparse attention: Longformer's and BigBird's layers (Hugging Face transformers)."""

import dataclasses

import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float

from relpos_jax.attention import attend
from relpos_jax.attention.longformer import (
    LocalQueries,
    Projected,
    attend_longformer,
)
from relpos_jax.attention.patterns import BigBird, WindowGlobal
from relpos_jax.interop.parity.cases import Case, covers
from relpos_jax.interop.parity.common import (
    join_heads,
    places,
    probabilities,
    split_heads,
)
from relpos_jax.masks import Bidirectional
from relpos_jax.positional import PositionEncoding
from relpos_jax.positional.protocol import Block, Params

NONE = PositionEncoding()


def projected(case: Case, x, heads: int, suffix: str = "") -> Projected:
    """Returns the case's queries, keys and values."""
    names = ("query", "key", "value")
    return Projected(
        *(split_heads(case.linear(f"{name}{suffix}", x), heads) for name in names)
    )


@covers("sparse", arrays=("in.is_global", "w.query_global.weight"))
def longformer(case: Case):
    x, heads = case["in.hidden_states"], case.config["num_heads"]
    side = case.config["attention_window"] // 2
    pad = case.arrays["in.is_pad"]
    real = ~pad[..., None]
    dense = np.zeros(case.arrays["aux.attention_probs_dense"].shape, np.float32)
    outs = {"pairs": [], "blockwise": []}
    # Global positions are a pattern's own, so each text is one for itself.
    for row, flags in enumerate(case.arrays["in.is_global"]):
        mask = WindowGlobal(side + 1, tuple(np.flatnonzero(flags).tolist()), False)
        one = x[row : row + 1]
        local, wide = (
            projected(case, one, heads),
            projected(case, one, heads, "_global"),
        )
        q_at, k_at = places(~jnp.asarray(pad[row : row + 1]))
        for implementation, found in outs.items():
            out = attend_longformer(
                NONE,
                {},
                local,
                wide,
                q_at,
                k_at,
                mask=mask,
                implementation=implementation,
            )
            found.append(join_heads(out))
        near = LocalQueries(mask.width, mask.positions, False)
        of_local = probabilities(NONE, {}, local.q, local.k, q_at, k_at, near)
        of_wide = probabilities(NONE, {}, wide.q, wide.k, q_at, k_at, Bidirectional())
        dense[row] = np.where(flags[:, None], of_wide[0], of_local[0])
        dense[row, :, pad[row]] = 0
    for found in outs.values():
        ours = np.where(real, jnp.concatenate(found), 0)
        yield (
            "out.hidden_states",
            ours,
            np.where(real, case["out.hidden_states"], 0),
        )
    yield "aux.attention_probs_dense", dense, case["aux.attention_probs_dense"]
    yield (
        "out.attentions_module_layout",
        *module_layout(case, dense, side),
    )
    if "out.global_attentions" in case:
        yield "out.global_attentions", *global_layout(case, dense)


def module_layout(case: Case, dense: np.ndarray, side: int):
    """Returns our and the source's weights as it lays them out, local rows alone.

    The last axis has the global keys in order, then the window from the left; a global
    key's place in the window is 0.
    """
    flags = case.arrays["in.is_global"]
    expected = case.arrays["out.attentions_module_layout"]
    ours = np.zeros_like(expected)
    most = expected.shape[-1] - 2 * side - 1
    batch, _, length, _ = dense.shape
    for b in range(batch):
        positions = np.flatnonzero(flags[b])
        for i in np.flatnonzero(~flags[b]):
            ours[b, i, :, : len(positions)] = dense[b, :, i, positions].T
            for j in range(max(0, i - side), min(length, i + side + 1)):
                if not flags[b, j]:
                    ours[b, i, :, most + j - i + side] = dense[b, :, i, j]
    left_out = (case.arrays["in.is_pad"] | flags)[..., None, None]
    return np.where(left_out, 0, ours), np.where(left_out, 0, expected)


def global_layout(case: Case, dense: np.ndarray):
    """Returns our and the source's weights of global queries, `[b h globals k]`."""
    expected = case.arrays["out.global_attentions"]
    ours = np.zeros_like(expected)
    for b, flags in enumerate(case.arrays["in.is_global"]):
        for number, i in enumerate(np.flatnonzero(flags)):
            ours[b, :, number] = dense[b, :, i]
    # Places past a text's own global tokens hold nothing that is used.
    counts = case.arrays["in.is_global"].sum(1)[:, None, None, None]
    used = np.arange(expected.shape[2])[None, None, :, None] < counts
    return np.where(used, ours, 0), np.where(used, expected, 0)


@dataclasses.dataclass(frozen=True)
class Repeated(PositionEncoding):
    """Counts a block of keys several times, as drawing a random block twice does."""

    size: int
    counts: tuple[tuple[int, ...], ...]

    def score(self, params: Params, block: Block) -> Float[Array, "b h q k"]:
        counts = jnp.asarray(self.counts)
        q, k = (at.position // self.size for at in (block.q_at, block.k_at))
        count = counts[q[:, :, None], k[:, None, :]][:, None]
        # A pair that is never counted is masked; its logarithm must be finite.
        return block.logits + jnp.log(jnp.maximum(count, 1).astype(jnp.float32))


@covers("sparse", arrays=("aux.block_multiplicity", "out.random_blocks"))
def big_bird(case: Case):
    config = case.config
    x, heads = case["in.hidden_states"], config["num_heads"]
    size, count = config["block_size"], config["num_blocks"]
    random = config["num_random_blocks"]
    q, k, v = projected(case, x, heads)
    keep = case.arrays["in.attention_mask"] > 0
    q_at, k_at = places(jnp.asarray(keep))
    outs = {"pairs": [], "blockwise": []}
    weights, counted, drawn = [], [], []
    for head in range(heads):
        one = [y[:, :, head : head + 1] for y in (q, k, v)]
        # The source's draws are given; its first and last query blocks have none.
        rows = case.arrays["out.random_blocks"][head].tolist()
        table = ((0,) * random, *map(tuple, rows), (0,) * random)
        mask = BigBird(
            size,
            3,
            random,
            (0, count - 1),
            causal=False,
            table=table if random else None,
        )
        inner = jnp.arange(1, count - 1)
        found = [np.asarray(mask.random_block(inner, n)) for n in range(random)]
        drawn.append(np.array(found, np.int32).reshape(random, count - 2).T)
        counts = multiplicity(mask, count)
        counted.append(counts)
        encoding = Repeated(size, tuple(map(tuple, counts.tolist())))
        for implementation, found in outs.items():
            out = attend(
                encoding,
                {},
                *one,
                q_at,
                k_at,
                mask=mask,
                implementation=implementation,
            )
            found.append(out)
        weights.append(probabilities(encoding, {}, *one[:2], q_at, k_at, mask))
    for found in outs.values():
        ours = join_heads(jnp.concatenate(found, 2))
        yield (
            "out.hidden_states",
            jnp.where(keep[..., None], ours, 0),
            case["out.hidden_states"],
        )
    yield "aux.block_multiplicity", np.stack(counted), case["aux.block_multiplicity"]
    ours = jnp.where(keep[:, None, :, None], jnp.concatenate(weights, 1), 0)
    expected = jnp.where(keep[:, None, :, None], case["aux.attention_probs_dense"], 0)
    yield "aux.attention_probs_dense", ours, expected
    # The draws are the source's, by way of the table.
    yield "out.random_blocks", np.stack(drawn), case["out.random_blocks"]


def multiplicity(mask: BigBird, count: int) -> np.ndarray:
    """Returns how often the source counts each key block for each query block.

    Once if it is near or global, once more for each time it is drawn, by any query
    block but the global ones.
    """
    x = np.arange(count)
    near = np.abs(x[:, None] - x[None, :]) <= mask.window // 2
    wide = np.isin(x, mask.global_blocks)
    counts = (near | wide[:, None] | wide[None, :]).astype(np.int32)
    for number in range(mask.random):
        drawn = np.asarray(mask.random_block(jnp.asarray(x), number))
        counts += (drawn[:, None] == x[None, :]) & ~wide[:, None]
    return counts

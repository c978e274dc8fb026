"""Compressive Transformer: two implementations by others, and what they share with us.

Neither is the authors' program, which was not released. Matched through our own
functions: which states are compressed and when, what both memories then hold, the
convolution, the attention-reconstruction loss and, where the source has it, its
gradient, and attention over compressed slots, memory and tokens together.

Not ours, and done here by hand. Both count a compressed slot as one token of distance,
while our models place it where its newest state stood. lucidrains keeps normalised
inputs in memory, reads its position table from another row while memories fill, and
reconstructs attention to the whole memory instead of the states that leave it; gates of
a GRU stand in for residuals; in one case layers read the next layer's memory.
"""

import dataclasses

import jax
import jax.numpy as jnp

from relpos_jax import where
from relpos_jax.attention import attend
from relpos_jax.interop.parity.cases import Case, covers
from relpos_jax.interop.parity.common import join_heads, split_heads
from relpos_jax.interop.parity.transformer_xl import layer_norm
from relpos_jax.masks import Causal
from relpos_jax.memory import CompressiveConfig, CompressiveMemory
from relpos_jax.memory.compression import Leaving, attention_loss, compress
from relpos_jax.positional import PositionEncoding
from relpos_jax.positional.protocol import leading
from relpos_jax.where import Where


@dataclasses.dataclass(frozen=True)
class _Rows(PositionEncoding):
    """Learned rows: q.R[i-j], and with a bias also v.k + S[i-j], all scaled."""

    def table(self, params, distance):
        index = jnp.clip(distance, 0, len(params["rows"]) - 1)
        return {name: params[name][index] for name in ("rows", "bias")}

    def score(self, params, block):
        own = params["content"][None, :, None]
        more = jnp.sum(own * block.k, axis=-1)[:, :, None]
        more = more + block.rel.query_dot(block.q, block.table["rows"])
        more = more + block.rel.bias(block.table["bias"])
        return block.logits + block.scale * more


def _rows(rows, bias=None, content=None):
    """Returns the parameters of `_Rows`, rows `[n h d]` by distance."""
    bias = jnp.zeros(rows.shape[:2]) if bias is None else bias
    content = jnp.zeros(rows.shape[1:]) if content is None else content
    return {"rows": rows, "bias": bias, "content": content}


def _convolution(case: Case, name: str):
    """Returns a Conv1d's parameters as ours: `[tap, in, out]`."""
    weight = case[f"w.{name}.weight"]
    return {"kernel": weight.transpose(2, 1, 0), "bias": case[f"w.{name}.bias"]}


def _norm(case: Case, name: str, x):
    return layer_norm(x, case[f"w.{name}.weight"], case[f"w.{name}.bias"])


@covers("compressive", source="labml", arrays=("in.mem.l*", "in.c_mem.l*"))
def labml(case: Case):
    heads, rate = case.config["heads"], case.config["compression_rate"]
    config = CompressiveConfig(case.config["cmem"], rate)
    x, total = jnp.swapaxes(case["in.x"], 0, 1), 0.0
    batch, length = x.shape[:2]
    for i in range(case.config["layers"]):
        layer, attn = f"layers.{i}", f"layers.{i}.self_attn"
        slots, old = (
            jnp.swapaxes(case[f"in.{name}.l{i}"], 0, 1) for name in ("c_mem", "mem")
        )
        yield f"out.new_mem.l{i}", jnp.swapaxes(x, 0, 1), case[f"out.new_mem.l{i}"]

        def part(name, x, attn=attn, layer=layer):
            x = _norm(case, f"{layer}.norm_self_attn", x)
            return split_heads(case.linear(f"{attn}.{name}.linear", x), heads)

        def pair(x, part=part):
            return part("key", x), part("value", x)

        old_at = where.contiguous(*old.shape[:2])
        at = where.contiguous(batch, length, start=old.shape[1])
        count = jnp.full(batch, old.shape[1] // rate)
        leaving = Leaving(old, old_at, count)

        def loss(params, x=x, old=old, leaving=leaving, at=at, part=part, pair=pair):
            new = compress(config, params, leaving)
            places = at, leaving.at, new.at
            found = attention_loss(
                part("query", x), pair(old), pair(new.states), *places
            )
            return found[0] / found[1], new.states

        conv = f"{layer}.compress.conv"
        params = _convolution(case, conv)
        (lost, new), grads = jax.value_and_grad(loss, has_aux=True)(params)
        total = total + lost
        name = f"out.compressed.l{i}"
        yield name, jnp.swapaxes(new, 0, 1), case[name]
        name = f"grad.{conv}"
        yield (
            f"{name}.weight",
            grads["kernel"].transpose(2, 1, 0),
            case[f"{name}.weight"],
        )
        yield f"{name}.bias", grads["bias"], case[f"{name}.bias"]

        keys = jnp.concatenate([slots, old, x], axis=1)
        k_at = where.contiguous(*keys.shape[:2])
        q_at = jax.tree.map(lambda x, n=length: x[:, -n:], k_at)
        seen = Causal()(q_at, k_at)[0]
        yield "in.mask", seen.astype(jnp.float32), case["in.mask"], 0.0
        rows = case[f"w.{attn}.key_pos_embeddings"]
        zero = rows.shape[0] // 2  # its row of distance 0; farther ones stand before
        by_distance = _rows(
            rows[zero::-1],
            case[f"w.{attn}.key_pos_bias"][zero::-1],
            case[f"w.{attn}.query_pos_bias"],
        )
        out = attend(_Rows(), by_distance, part("query", x), *pair(keys), q_at, k_at)
        x = x + case.linear(f"{attn}.output", join_heads(out))
        inner = _norm(case, f"{layer}.norm_ff", x)
        inner = jax.nn.relu(case.linear(f"{layer}.feed_forward.layer1", inner))
        x = x + case.linear(f"{layer}.feed_forward.layer2", inner)
    yield "out.y", jnp.swapaxes(_norm(case, "norm", x), 0, 1), case["out.y"]
    name = "out.reconstruction_loss"
    yield name, total, case[name]


@covers("compressive", arrays=("in.ids.s*", "w.pos_emb", "out.aux_loss.s*"))
def lucidrains(case: Case):
    settings = case.config
    depth, heads, rate = (settings[n] for n in ("depth", "heads", "cmem_ratio"))
    layers = [n - 1 for n in settings.get("memory_layers", range(1, depth + 1))]
    sizes = settings["mem_len"], settings["cmem_len"]
    batch, length = case["in.ids.s0"].shape
    memory = CompressiveMemory.empty(
        len(layers), batch, *sizes, settings["dim"], rate=rate
    )
    for number in range(settings["segments"]):
        if settings["enhanced_recurrence"]:
            memory = dataclasses.replace(
                memory,
                hidden=jnp.roll(memory.hidden, -1, axis=0),
                compressed=jnp.roll(memory.compressed, -1, axis=0),
            )
        at = where.contiguous(batch, length, start=number * length)
        x = case["w.token_emb.weight"][case[f"in.ids.s{number}"]]
        entries, lost = [], 0.0
        rows = _table(case, memory, length)
        for i in range(depth):
            x, entry, more = _attention(case, i, layers, x, at, memory, rows, heads)
            entries, lost = entries + [entry] * (i in layers), lost + more
            x = _feedforward(case, i, x)
        memory = memory.write(entries, at)
        seen = min((number + 1) * length, sizes[0])
        made = case[f"out.compressed_mem.s{number}"].shape[2]
        real = int((memory.compressed_at.segment[0, 0] != 0).sum())
        ours = {
            "logits": case.linear("to_logits.1", x),
            "mem": memory.hidden[:, :, memory.size - seen :],
            "compressed_mem": memory.compressed[:, :, memory.slots - real :],
            "aux_loss": lost / len(layers),
        }
        if real != made:
            raise ValueError(f"{made} compressed slots expected, {real} found")
        for name, value in ours.items():
            yield f"out.{name}.s{number}", value, case[f"out.{name}.s{number}"]


def _table(case: Case, memory: CompressiveMemory, length: int):
    """Returns the rows by distance, of as many keys as there are by now."""
    filled = int((memory.at.segment[0] != 0).sum())
    filled += int((memory.compressed_at.segment[0, 0] != 0).sum())
    rows = jnp.swapaxes(case["w.pos_emb"][:, : filled + length], 0, 1)
    return _rows(rows[::-1])


def _attention(case: Case, i: int, layers, x, at, memory, rows, heads):
    """Returns the block's output, a memory entry and the auxiliary loss."""
    name = f"attn_layers.{i}.fn"
    h = _norm(case, f"{name}.norm", x)

    def pair(states):
        kv = jnp.split(case.linear(f"{name}.fn.to_kv", states), 2, axis=-1)
        return tuple(split_heads(part, heads) for part in kv)

    q = split_heads(case.linear(f"{name}.fn.to_q", h), heads)
    entry, lost = None, 0.0
    (k, v), k_at = pair(h), at
    if i in layers:
        number = layers.index(i)
        (k, v), k_at, entry = memory.read(number, h, at, pair)
        config = CompressiveConfig(memory.slots, memory.rate)
        leaving = memory.leaving(number, entry, at)
        params = _convolution(case, f"{name}.fn.compress_mem_fn.conv")
        slots = compress(config, params, leaving)
        entry = entry._replace(slots=slots.states, at=slots.at)
        if int(leaving.count[0]):
            part = slice(memory.slots, memory.slots + memory.size)
            old = k[:, part], v[:, part]
            new = pair(slots.states)
            found = attention_loss(q, old, new, at, memory.at, slots.at)
            lost = found[0] / found[1]
    # A slot of any kind is one step of distance.
    steps = jnp.cumsum(k_at.segment != 0, axis=1)
    k_at = Where(steps, k_at.segment)
    q_at = jax.tree.map(lambda x: x[:, -q.shape[1] :], k_at)
    out = join_heads(attend(_Rows(), rows, q, k, v, q_at, k_at))
    return _joined(case, f"attn_layers.{i}", x, out, f"{name}.fn.to_out"), entry, lost


def _feedforward(case: Case, i: int, x):
    name = f"ff_layers.{i}.fn"
    h = case.linear(f"{name}.fn.w1", _norm(case, f"{name}.norm", x))
    h = jax.nn.gelu(h, approximate=False)
    return _joined(case, f"ff_layers.{i}", x, h, f"{name}.fn.w2")


def _joined(case: Case, name: str, x, out, linear: str):
    """Adds a block's output to its input, or lets a GRU's gates join them."""
    y = case.linear(linear, out)
    if f"w.{name}.gru.weight_ih" not in case:
        return x + y

    def gates(part, x):
        weight, bias = (case[f"w.{name}.gru.{n}_{part}"] for n in ("weight", "bias"))
        return jnp.split(x @ weight.T + leading(bias, 3), 3, axis=-1)

    (r_in, z_in, n_in), (r_old, z_old, n_old) = gates("ih", y), gates("hh", x)
    reset, keep = jax.nn.sigmoid(r_in + r_old), jax.nn.sigmoid(z_in + z_old)
    return (1 - keep) * jnp.tanh(n_in + reset * n_old) + keep * x

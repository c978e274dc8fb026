"""Attention layers of transformers 4.37.2: T5, DeBERTa, Transformer-XL."""

from experiments.benchmarks.peers import Missing, Peer
from experiments.benchmarks.peers.torch_attention import (
    Given,
    device,
    gradients,
    random,
    torch,
)


def attention(variant: str, length: int, heads: int, head_dim: int, dtype: str) -> Peer:
    """Returns a forward and a backward pass of the layer with the encoding `variant`.

    Raises:
      Missing: it has no such layer, or is wanted in another type than float32.
    """
    if dtype != "float32":
        raise Missing("is measured in float32 only")
    layers = {"t5": t5, "deberta": deberta, "transformer_xl": transformer_xl}
    if variant not in layers:
        raise Missing(f"has no {variant}")
    return gradients(layers[variant](length, heads, head_dim))


def future(length: int):
    """Returns `[q k]`, whether the key comes after the query."""
    return torch.ones(length, length, dtype=torch.bool, device=device()).triu(1)


def t5(length, heads, head_dim):
    from transformers import T5Config
    from transformers.models.t5.modeling_t5 import T5Attention

    width = heads * head_dim
    config = T5Config(
        d_model=width, d_kv=head_dim, num_heads=heads, dropout_rate=0.0, is_decoder=True
    )
    layer = T5Attention(config, has_relative_attention_bias=True).to(device())
    for name in "qkv":
        setattr(layer, name, Given(random(1, length, width).detach()))
    layer.o = torch.nn.Identity()
    x = torch.zeros(1, length, width, device=device())
    mask = torch.zeros(1, 1, length, length, device=device())
    mask.masked_fill_(future(length), torch.finfo(torch.float32).min)
    return lambda: layer(x, mask=mask)[0]


def deberta(length, heads, head_dim):
    from transformers import DebertaConfig
    from transformers.models.deberta.modeling_deberta import DisentangledSelfAttention

    width = heads * head_dim
    config = DebertaConfig(
        hidden_size=width,
        num_attention_heads=heads,
        relative_attention=True,
        max_relative_positions=512,
        pos_att_type=["c2p", "p2c"],
        hidden_dropout_prob=0.0,
        attention_probs_dropout_prob=0.0,
    )
    layer = DisentangledSelfAttention(config).to(device())
    layer.in_proj = Given(random(1, length, 3 * width).detach())
    x = torch.zeros(1, length, width, device=device())
    table = random(1024, width)
    mask = (~future(length))[None, None]
    return lambda: layer(x, mask, rel_embeddings=table)


def transformer_xl(length, heads, head_dim):
    from transformers.models.deprecated.transfo_xl import modeling_transfo_xl as module

    width = heads * head_dim
    layer = module.RelPartialLearnableMultiHeadAttn(heads, width, head_dim, 0.0)
    layer = layer.to(device())
    for name in ("r_w_bias", "r_r_bias"):
        torch.nn.init.normal_(getattr(layer, name), 0.0, 0.02)
    return relative(layer, module.PositionalEmbedding(width).to(device()), length)


def relative(layer, embedding, length, biases=()):
    """Returns a call of a Transformer-XL layer, here or in the authors' code."""
    width = layer.n_head * layer.d_head
    layer.qkv_net = Given(random(length, 1, 3 * width).detach())
    layer.o_net = layer.layer_norm = torch.nn.Identity()
    x = torch.zeros(length, 1, width, device=device())
    places = torch.arange(length - 1, -1, -1.0, device=device())
    r = embedding(places)
    mask = future(length)[:, :, None]
    return lambda: _first(layer(x, r, *biases, attn_mask=mask))


def _first(out):
    return out[0] if isinstance(out, (list, tuple)) else out

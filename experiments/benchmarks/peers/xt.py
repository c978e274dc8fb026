"""x-transformers: a decoder with rotary positions and segment memory.

Variants of `training`: "rope", and "rope+fused" with PyTorch's fused attention. It adds
no position scores, so a step of it is less work than one of Transformer-XL.
"""

from experiments.benchmarks.peers import Missing, Peer
from experiments.benchmarks.peers.torch_attention import gradients, random
from experiments.benchmarks.peers.torch_step import torch
from experiments.benchmarks.peers.torch_step import training as step
from experiments.benchmarks.workloads import Workload

try:
    from x_transformers import Decoder, TransformerWrapper
    from x_transformers import x_transformers as modules
    from x_transformers.attend import Attend
except ImportError as error:
    raise Missing(
        "x-transformers is not installed: pip install 'relpos_jax[bench]'"
    ) from error

POSITIONS = {
    "rope": {"rotary_pos_emb": True},
    "alibi": {"alibi_pos_bias": True},
    "t5": {"rel_pos_bias": True},
    "none": {},
}


def training(variant: str, workload: dict):
    """Returns updates of the model."""
    sizes = Workload(**workload)
    name, _, fused = variant.partition("+")
    model = TransformerWrapper(
        num_tokens=sizes.vocabulary,
        max_seq_len=sizes.length,
        max_mem_len=sizes.memory,
        tie_embedding=True,
        use_abs_pos_emb=False,
        attn_layers=Decoder(
            dim=sizes.width,
            depth=sizes.layers,
            heads=sizes.heads,
            attn_dim_head=sizes.width // sizes.heads,
            ff_mult=sizes.feedforward // sizes.width,
            attn_flash=bool(fused),
            **POSITIONS[name],
        ),
    )

    def loss(inputs, targets, memory):
        logits, memory = model(inputs, mems=memory, return_mems=True)
        flat = logits.flatten(0, 1), targets.flatten()
        memory = [entry.detach() for entry in memory]
        return torch.nn.functional.cross_entropy(*flat), memory

    return step(model, loss, sizes, time_first=False)


def attention(variant: str, length: int, heads: int, head_dim: int, dtype: str) -> Peer:
    """Returns a forward and a backward pass of its attention, without projections.

    Variants: "none", "rope", "alibi" and "t5", "+fused" or not.
    """
    name, _, fused = variant.partition("+")
    shape = (1, heads, length, head_dim)
    q, k, v = (random(*shape, dtype=dtype) for _ in range(3))
    attend = Attend(causal=True, heads=heads, flash=bool(fused))
    if name == "none":
        return gradients(lambda: attend(q, k, v)[0])
    if name == "rope":
        turn, rotary = modules.apply_rotary_pos_emb, modules.RotaryEmbedding(head_dim)
        rotary.to(q.device)

        def forward():
            angles, _ = rotary.forward_from_seq_len(length)
            return attend(turn(q, angles), turn(k, angles), v)[0]

        return gradients(forward)
    if name == "alibi":
        bias = modules.AlibiPositionalBias(heads)
    elif name == "t5":
        scale = head_dim**0.5
        bias = modules.RelativePositionBias(scale=scale, causal=True, heads=heads)
    else:
        raise Missing(f"has no {name}")
    bias.to(q.device)
    return gradients(lambda: attend(q, k, v, attn_bias=bias(length, length))[0])

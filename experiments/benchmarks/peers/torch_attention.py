"""One causal attention sub-layer in PyTorch, its own or another library's.

Layers that project their inputs themselves get queries, keys and values instead of the
projections, so that attention alone is measured.
"""

import math

from experiments.benchmarks.peers import Missing, Peer
from experiments.benchmarks.peers.torch_step import device, torch

WIDTHS = {"float32": torch.float32, "bfloat16": torch.bfloat16}


class Given(torch.nn.Module):
    """Stands where a projection was, and returns the same tensor whatever it reads."""

    def __init__(self, tensor):
        super().__init__()
        self.tensor = torch.nn.Parameter(tensor)

    def forward(self, _):
        return self.tensor


def random(*shape, dtype="float32"):
    """Returns random values that gradients are taken by."""
    values = torch.randn(*shape, device=device(), dtype=WIDTHS[dtype])
    return values.requires_grad_()


def gradients(forward) -> Peer:
    """Returns `forward()` and the gradients of all that it depends on."""
    weights = None

    def run(count):
        nonlocal weights
        for _ in range(count):
            out = forward()
            if weights is None:
                weights = torch.cos(torch.arange(out.numel(), device=out.device))
                weights = weights.reshape(out.shape).to(out.dtype)
            out.backward(weights)
        if out.is_cuda:
            torch.cuda.synchronize()

    return Peer(run)


def fused(variant: str, length: int, heads: int, head_dim: int, dtype: str) -> Peer:
    """PyTorch's fused kernel, with a mask of pairs where positions are a bias."""
    shape = (1, heads, length, head_dim)
    q, k, v = (random(*shape, dtype=dtype) for _ in range(3))
    product = torch.nn.functional.scaled_dot_product_attention
    if variant == "none":
        return gradients(lambda: product(q, k, v, is_causal=True))
    if variant == "rope":
        half = head_dim // 2
        rate = 10000.0 ** (-torch.arange(half, device=q.device) / half)
        angle = torch.arange(length, device=q.device)[:, None] * rate
        cos, sin = angle.cos().to(q.dtype), angle.sin().to(q.dtype)

        def turn(x):
            one, two = x[..., :half], x[..., half:]
            return torch.cat([one * cos - two * sin, two * cos + one * sin], dim=-1)

        return gradients(lambda: product(turn(q), turn(k), v, is_causal=True))
    step = torch.arange(length, device=q.device)
    distance = step[:, None] - step[None]
    future = (distance < 0)[None]
    if variant == "alibi":
        slopes = 2.0 ** (-8 * torch.arange(1, heads + 1, device=q.device) / heads)
        bias = -slopes[:, None, None] * distance
        bias = bias.masked_fill(future, -math.inf).to(q.dtype)[None]
        return gradients(lambda: product(q, k, v, attn_mask=bias))
    if variant == "t5":
        table = random(32, heads, dtype=dtype)
        far = distance.clamp(min=0)
        large = torch.log(far.clamp(min=1) / 16) / math.log(8) * 16
        bucket = torch.where(far < 16, far, (16 + large.long()).clamp(max=31))

        def forward():
            bias = table[bucket].permute(2, 0, 1).masked_fill(future, -math.inf)
            return product(q, k, v, attn_mask=bias[None], scale=1.0)

        return gradients(forward)
    raise Missing(f"has no {variant}")

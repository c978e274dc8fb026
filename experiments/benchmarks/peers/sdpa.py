"""PyTorch's `scaled_dot_product_attention`."""

from experiments.benchmarks.peers.torch_attention import fused as attention

__all__ = ["attention"]

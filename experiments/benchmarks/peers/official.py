"""The authors' Transformer-XL (kimiyoung/transformer-xl, its `pytorch` folder).

It is not on the package index and is not copied here: `--official=PATH` names a clone.
"""

import importlib
import pathlib
import sys

from experiments.benchmarks.peers import Missing, Peer
from experiments.benchmarks.peers.hf_attention import relative
from experiments.benchmarks.peers.torch_attention import device, gradients, random
from experiments.benchmarks.peers.torch_step import torch
from experiments.benchmarks.peers.torch_step import training as step
from experiments.benchmarks.workloads import Workload


def training(variant: str, workload: dict, official: str | None = None):
    """Returns updates of the model; `variant` is not used."""
    sizes = Workload(**workload)
    module = load(official)
    model = module.MemTransformerLM(
        sizes.vocabulary,
        sizes.layers,
        sizes.heads,
        sizes.width,
        sizes.width // sizes.heads,
        sizes.feedforward,
        dropout=0.0,
        dropatt=0.0,
        pre_lnorm=True,
        tgt_len=sizes.length,
        ext_len=0,
        mem_len=sizes.memory,
    )
    for parameter in model.parameters():
        torch.nn.init.normal_(parameter, 0.0, 0.02)

    def loss(inputs, targets, memory):
        value, *memory = model(inputs, targets, *(memory or ()))
        return value.mean(), memory

    return step(model, loss, sizes, time_first=True)


def attention(
    variant: str,
    length: int,
    heads: int,
    head_dim: int,
    dtype: str,
    official: str | None = None,
) -> Peer:
    """Returns a forward and a backward pass of one layer, without its projections.

    "transformer_xl", or "shaw": its learned vectors and biases of distances, which are
    added to scores alone.
    """
    module, width = load(official), heads * head_dim
    if dtype != "float32":
        raise Missing("is measured in float32 only")
    if variant == "transformer_xl":
        kind = module.RelPartialLearnableMultiHeadAttn
        embedding = module.PositionalEmbedding(width).to(device())
        biases = random(heads, head_dim), random(heads, head_dim)
        layer = kind(heads, width, head_dim, 0.0).to(device())
        return gradients(relative(layer, embedding, length, biases))
    if variant == "shaw" and hasattr(module, "RelLearnableMultiHeadAttn"):
        layer = module.RelLearnableMultiHeadAttn(heads, width, head_dim, 0.0)
        biases = random(heads, head_dim), random(length, heads)
        table = random(length, heads, head_dim)
        call = relative(layer.to(device()), lambda _: table, length, biases)
        return gradients(call)
    raise Missing(f"has no {variant}")


def load(folder: str | None):
    """Returns the module `mem_transformer` of a clone.

    Today's PyTorch refuses two things that it does: it reads the CUDA version on
    machines without CUDA, and masks with bytes where booleans are wanted.

    Raises:
      Missing: no folder, or not that one.
    """
    if folder is None:
        raise Missing("not given: --official=PATH of a clone of the authors' code")
    path = pathlib.Path(folder).expanduser()
    path = path / "pytorch" if (path / "pytorch").is_dir() else path
    if not (path / "mem_transformer.py").is_file():
        raise Missing(f"{path} has no mem_transformer.py")
    sys.path[:0] = [str(path), str(path / "utils")]
    torch.Tensor.byte = torch.Tensor.bool
    version = torch.version.cuda
    torch.version.cuda = version or "0.0"
    try:
        return importlib.import_module("mem_transformer")
    finally:
        torch.version.cuda = version

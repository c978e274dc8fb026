"""Hugging Face's Transformer-XL (transformers 4.37.2, the last whose model runs)."""

from experiments.benchmarks.peers import Missing
from experiments.benchmarks.peers.hf_attention import attention
from experiments.benchmarks.peers.torch_step import training as step
from experiments.benchmarks.workloads import Workload

try:
    from transformers import TransfoXLConfig, TransfoXLLMHeadModel
except ImportError as error:
    raise Missing(
        "transformers 4.37.2 is not installed: pip install 'relpos_jax[bench]'"
    ) from error

__all__ = ["attention", "training"]


def training(variant: str, workload: dict):
    """Returns updates of the model; `variant` is not used."""
    sizes = Workload(**workload)
    config = TransfoXLConfig(
        vocab_size=sizes.vocabulary,
        cutoffs=[],
        d_model=sizes.width,
        d_embed=sizes.width,
        n_head=sizes.heads,
        d_head=sizes.width // sizes.heads,
        d_inner=sizes.feedforward,
        div_val=1,
        pre_lnorm=True,
        n_layer=sizes.layers,
        mem_len=sizes.memory,
        clamp_len=-1,
        dropout=0.0,
        dropatt=0.0,
        proj_share_all_but_first=False,
    )
    model = TransfoXLLMHeadModel(config)

    def loss(inputs, targets, memory):
        # It shifts labels itself, so a row has one target fewer than with the others.
        out = model(inputs, mems=memory, labels=inputs)
        return out.losses.mean(), out.mems

    return step(model, loss, sizes, time_first=False)

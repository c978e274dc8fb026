"""The extrapolation study with x-transformers: trains each model and evaluates it.

Reads the same config as `experiments.extrapolate`, and the same batches and targets.
Writes `scores.json`: bits per byte by encoding, protocol and length.
"""

import json
import math
import pathlib

import numpy as np
from absl import app, flags
from ml_collections import config_flags

from experiments.benchmarks.peers.torch_step import device, torch
from experiments.benchmarks.peers.xt import POSITIONS, Decoder, TransformerWrapper
from relpos_jax import data
from relpos_jax.config import RunConfig
from relpos_jax.evaluation import windows
from relpos_jax.evaluation.config import plan_windows
from relpos_jax.evaluation.extrapolation import plan_study

_CONFIG = config_flags.DEFINE_config_file("config", None, "The study.")
_WORKDIR = flags.DEFINE_string("workdir", None, "Folder of the scores.", required=True)
flags.DEFINE_bool("progress", True, "Not used; as in experiments.extrapolate.")


def train(run: RunConfig, name: str, tokens: np.ndarray, longest: int):
    """Returns a trained model."""
    sizes, training = run.model, run.training
    torch.manual_seed(training.seed)
    model = TransformerWrapper(
        num_tokens=256,
        max_seq_len=longest,
        tie_embedding=True,
        use_abs_pos_emb=False,
        attn_layers=Decoder(
            dim=sizes.width,
            depth=sizes.layers,
            heads=sizes.heads,
            attn_dim_head=sizes.head_dim,
            ff_mult=sizes.feedforward // sizes.width,
            attn_flash=True,
            **POSITIONS[name],
        ),
    ).to(device())
    optimizer = torch.optim.AdamW(
        model.parameters(),
        lr=training.learning_rate,
        betas=(training.b1, training.b2),
        weight_decay=training.weight_decay,
    )
    batches = data.Windows(tokens, training.batch, training.length, seed=training.seed)
    last = training.final_learning_rate_fraction
    for step in range(training.steps):
        warm = min(1.0, (step + 1) / max(training.warmup, 1))
        part = (step + 1 - training.warmup) / (training.steps - training.warmup)
        cosine = 0.5 * (1 + math.cos(math.pi * min(max(part, 0.0), 1.0)))
        for group in optimizer.param_groups:
            rate = training.learning_rate * warm * (last + (1 - last) * cosine)
            group["lr"] = rate
        batch = batches.batch(step)
        losses(model, batch.inputs, batch.targets).mean().backward()
        if training.clip is not None:
            torch.nn.utils.clip_grad_norm_(model.parameters(), training.clip)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
    return model.eval()


def losses(model, inputs: np.ndarray, targets: np.ndarray):
    """Returns the loss of each token, `[b t]`."""
    inputs = torch.from_numpy(inputs).long().to(device())
    targets = torch.from_numpy(targets).long().to(device())
    logits = model(inputs).transpose(1, 2)
    return torch.nn.functional.cross_entropy(logits, targets, reduction="none")


@torch.no_grad()
def score(model, text, protocol: str, length: int, train_length: int, config) -> float:
    """Returns bits per byte under one protocol at one length."""
    plan = plan_windows(protocol, text.size, length, train_length, config)
    rows = max(1, config.tokens_per_batch // length)
    total = 0.0
    for at in range(0, len(plan.start), rows):
        here = slice(at, at + rows)
        block = windows.fill(text, plan, here, len(plan.start[here]))
        found = losses(model, block.inputs, block.targets).cpu().numpy()
        total += float(found[block.weights].sum(dtype=np.float64))
    return total / plan.tokens / math.log(2)


def main(_):
    plan = plan_study(_CONFIG.value)
    run, config = plan.any_run, plan.evaluation
    corpus = run.data.load()
    lengths = config.lengths(run.training.length)
    scores = {}
    for name in plan.study.encodings:
        model = train(plan.runs[name], name, corpus.train, lengths[-1])
        for protocol in config.protocols:
            for length in lengths:
                value = score(
                    model,
                    corpus.held_out,
                    protocol,
                    length,
                    run.training.length,
                    config,
                )
                scores[f"{name}/{protocol}/{length}"] = value
    folder = pathlib.Path(_WORKDIR.value)
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "scores.json").write_text(json.dumps(scores, indent=1))
    print(json.dumps(scores))


if __name__ == "__main__":
    app.run(main)

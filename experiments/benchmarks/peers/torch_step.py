"""A training step in PyTorch: one forward pass, one backward pass, one Adam update."""

from experiments.benchmarks.peers import Missing, Peer
from experiments.benchmarks.workloads import ADAM, LEARNING_RATE, Workload

try:
    import torch
except ImportError as error:
    raise Missing(
        "PyTorch is not installed: pip install 'relpos_jax[bench]' (its CPU build is "
        "smaller; see docs/performance.md)"
    ) from error


def device() -> torch.device:
    """Returns the accelerator, where there is one."""
    return torch.device("cuda" if torch.cuda.is_available() else "cpu")


def training(model: torch.nn.Module, loss, sizes: Workload, *, time_first: bool):
    """Returns a `Peer` that updates a model.

    Args:
      model: its parameters are updated.
      loss: `(inputs, targets, memory) -> (loss, memory)`; memory is None at first.
      sizes: of the batches.
      time_first: tokens are `[t b]`, else `[b t]`.
    """
    model.to(device()).train()
    optimizer = torch.optim.Adam(
        model.parameters(),
        lr=LEARNING_RATE,
        betas=(ADAM["b1"], ADAM["b2"]),
        eps=ADAM["eps"],
    )
    rows = torch.from_numpy(sizes.bytes(4)).to(device())
    if time_first:
        rows = rows.transpose(1, 2).contiguous()
    axis = 1 if time_first else 2
    inputs = rows.narrow(axis, 0, sizes.length).contiguous()
    targets = rows.narrow(axis, 1, sizes.length).contiguous()
    memory, step = None, 0

    def run(count):
        nonlocal memory, step
        for _ in range(count):
            at = step % len(inputs)
            value, memory = loss(inputs[at], targets[at], memory)
            value.backward()
            optimizer.step()
            optimizer.zero_grad(set_to_none=True)
            step += 1
        value.item()  # waits for it

    run(2)  # until memory is full
    return Peer(run, sum(p.numel() for p in model.parameters()))

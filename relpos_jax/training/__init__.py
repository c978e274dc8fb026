"""Training: state, step, loop, optimiser, losses, checkpoints, metric writers."""

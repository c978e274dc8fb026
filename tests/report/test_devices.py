"""What a device holds of a model, on a mesh that isn't there."""

from relpos_jax import positional
from relpos_jax.models import ModelConfig
from relpos_jax.report import devices
from relpos_jax.training.config import TrainingConfig


def share_of(count: int, **sizes) -> devices.Share:
    model = ModelConfig(
        vocabulary=256,
        layers=1,
        width=64,
        heads=4,
        head_dim=16,
        feedforward=128,
        position=positional.make("rope"),
        **sizes,
    )
    return devices.share("small", model, TrainingConfig(), count)


def test_one_device_holds_all():
    share = share_of(1)
    assert share.parameters == 4 * share.count
    assert share.parameters + share.optimiser == share.whole
    assert share.rows == 1


def test_more_hold_less_and_the_numbers_add_up():
    share = share_of(16)
    assert share.count == share_of(1).count
    assert share.mesh["fsdp"] * share.mesh["tensor"] == 16  # all of it is cut
    cut = share.count - 5 * 64 - 64 - 128  # norms' and biases' parts stay whole or few
    assert share.parameters >= 4 * cut / 16
    assert share.parameters + share.optimiser < share.whole / 8
    row = devices.table([share]).splitlines()[-1]
    assert row.startswith(f"| small | {share.count:,} | fsdp ")

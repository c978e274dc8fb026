"""Models: Flax NNX modules that hold parameters and nothing else."""

from relpos_jax.models.adaptive import AdaptiveConfig
from relpos_jax.models.config import Hierarchy, ModelConfig
from relpos_jax.models.decoder import TransformerXL
from relpos_jax.models.encoder import Encoder, build
from relpos_jax.models.encoder_decoder import EncoderDecoder, EncoderDecoderConfig

__all__ = [
    "AdaptiveConfig",
    "Encoder",
    "EncoderDecoder",
    "EncoderDecoderConfig",
    "Hierarchy",
    "ModelConfig",
    "TransformerXL",
    "build",
]

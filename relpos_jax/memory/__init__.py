"""Memory as data: pytrees that a model takes and returns, never module state."""

from relpos_jax.memory.cache import KeyValueCache
from relpos_jax.memory.compression import CompressiveConfig
from relpos_jax.memory.compressive import CompressiveMemory
from relpos_jax.memory.context import Context
from relpos_jax.memory.segment import SegmentMemory

__all__ = [
    "CompressiveConfig",
    "CompressiveMemory",
    "Context",
    "KeyValueCache",
    "Memory",
    "SegmentMemory",
]

Memory = SegmentMemory | CompressiveMemory | KeyValueCache

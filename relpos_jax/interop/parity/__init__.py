"""Parity: our encodings and models beside the outputs of independent implementations.

Each module of this package holds the adapters of one family; importing the package
registers them all. An adapter is a generator decorated with `covers`.
"""

import importlib
import pkgutil

from relpos_jax.interop.parity.cases import (
    ADAPTERS,
    Case,
    Row,
    Tolerance,
    check,
    covers,
    load,
)

__all__ = ["ADAPTERS", "Case", "Row", "Tolerance", "check", "covers", "load"]

for _module in pkgutil.iter_modules(__path__):
    importlib.import_module(f"{__name__}.{_module.name}")

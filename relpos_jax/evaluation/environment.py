"""What a result was measured on: versions, machine, device, commit."""

import os
import pathlib
import platform
import subprocess
from importlib import metadata

import jax


def describe() -> dict[str, str | int]:
    """Returns versions, cores, processor, device and commit as JSON values.

    The commit is that of the source tree the package is imported from, "unknown" where
    that is no git checkout (or git is not installed); "+ changes" marks a tree that
    differs from it.
    """
    device = jax.devices()[0]
    return {
        "python": platform.python_version(),
        "jax": jax.__version__,
        "jaxlib": metadata.version("jaxlib"),
        "flax": metadata.version("flax"),
        "optax": metadata.version("optax"),
        "system": f"{platform.system()} {platform.machine()}",
        "cores": _cores(),
        "processor": _processor(),
        "device": f"{len(jax.devices())} x {device.platform} ({device.device_kind})",
        "commit": _commit(),
    }


def _cores() -> int:
    """Cores that this process may use, which can be fewer than the machine has."""
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


def _processor() -> str:
    try:
        lines = pathlib.Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        lines = []
    models = [x.partition(":")[2].strip() for x in lines if x.startswith("model name")]
    return models[0] if models else platform.processor() or "unknown"


def _commit() -> str:
    root = pathlib.Path(__file__).resolve().parents[2]
    if not (root / ".git").exists():
        return "unknown"  # an installed package, perhaps inside somebody's repository
    try:
        commit = _git(root, "rev-parse", "--short=12", "HEAD")
        changed = _git(root, "status", "--porcelain", "--untracked-files=no")
    except (OSError, subprocess.SubprocessError):
        return "unknown"
    return f"{commit} + changes" if changed else commit


def _git(root: pathlib.Path, *arguments: str) -> str:
    result = subprocess.run(
        ["git", "-C", str(root), *arguments],
        capture_output=True,
        text=True,
        check=True,
        timeout=10,
    )
    return result.stdout.strip()

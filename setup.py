"""Packaging. What is needed is stated here as ranges; `constraints.txt` pins it."""

from pathlib import Path

from setuptools import find_packages, setup

REQUIRES = [
    "absl-py>=2.1",
    "flax>=0.12.8,<0.13",
    "grain>=0.2.15",
    # tensorflow-datasets imports it on every Python and declares it only before 3.9.
    "importlib_resources>=6.0",
    "jax>=0.10.2,<0.12",
    "jaxlib>=0.10.2,<0.12",
    "jaxtyping>=0.3.7",
    "matplotlib>=3.9",
    "ml-collections>=1.1",
    "numpy>=2.0",
    "optax>=0.2.6",
    "orbax-checkpoint>=0.12.8,<0.13",
    "pandas>=2.2",
    "tensorboardX>=2.6.4",
    "tensorflow-datasets>=4.9.9",
    "tqdm>=4.66",
]

NOTEBOOKS = [
    "ipykernel>=6.29",
    "nbclient>=0.10",
    "nbformat>=5.10",
]

# Only for models of subwords that the user brings.
SUBWORDS = ["sentencepiece>=0.2", "tokenizers>=0.20"]

# The tests execute the notebook, hence NOTEBOOKS.
TEST = NOTEBOOKS + [
    "beartype>=0.20",
    "hypothesis>=6.100",
    "packaging>=24.0",
    "pytest>=8.3",
    "pytest-xdist>=3.6",
    "ruff>=0.9",
    "safetensors>=0.5",
]

# What experiments/benchmarks compares with. Newer releases of transformers have a
# Transformer-XL that no longer runs, or none.
BENCH = [
    "torch==2.13.0",
    "transformers==4.37.2",
    "x-transformers>=2.31",
]

ROOT = Path(__file__).parent
README = ROOT / "README.md"

setup(
    name="relpos_jax",
    version="0.1.0",
    description="Research code for position encodings of transformers, in JAX and Flax",
    long_description=README.read_text(encoding="utf-8") if README.exists() else "",
    long_description_content_type="text/markdown",
    author="The relpos_jax authors",
    license="Apache-2.0",
    python_requires=">=3.11",
    packages=find_packages(include=["relpos_jax", "relpos_jax.*"]),
    install_requires=REQUIRES,
    extras_require={
        "bench": BENCH,
        "notebooks": NOTEBOOKS,
        "subwords": SUBWORDS,
        "test": TEST,
        "all": TEST,
    },
)

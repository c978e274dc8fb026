"""LongRoPE's search for factors: one a plane, found on a given model.

Ding et al. (2024), algorithm 1: the frequency `theta_i` of each plane is
divided by its own `lambda_i`, except at the first `n` positions, and an evolutionary
search finds the numbers that the model itself likes best on long documents.
"""

import dataclasses
from collections.abc import Callable, Sequence
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jaxtyping import Array, Float, Int

from relpos_jax.models import TransformerXL
from relpos_jax.positional.protocol import Dims, Params
from relpos_jax.positional.rope import Rope, rotate
from relpos_jax.positional.rope_frequencies import ntk_exponents
from relpos_jax.positional.rope_scaling import RopeScaling
from relpos_jax.where import Where

STEP = 100  # factors are whole hundredths
START_TOKENS = (0, 1, 2, 4, 8, 12, 16, 20, 24, 28, 32, 64, 128, 256)

Objective = Callable[[tuple[float, ...], int], float]


class Candidate(NamedTuple):
    """Factors in hundredths, one a plane and never falling, and the start tokens."""

    hundredths: tuple[int, ...]
    start_tokens: int

    @property
    def factors(self) -> tuple[float, ...]:
        """The `lambda_i`."""
        return tuple(x / STEP for x in self.hundredths)


class Found(NamedTuple):
    """What a search found.

    Attributes:
      factors, start_tokens: the best candidate.
      loss: its objective.
      history: the best loss so far, one a generation, the initial one first.
      evaluations: how many candidates the objective was asked for.
    """

    factors: tuple[float, ...]
    start_tokens: int
    loss: float
    history: tuple[float, ...]
    evaluations: int

    def scaling(self, factor: float, original_length: int) -> RopeScaling:
        """Returns the scaling that a model takes: these factors past the length."""
        return RopeScaling(
            "longrope",
            factor,
            original_length,
            short_factor=(1.0,) * len(self.factors),
            long_factor=self.factors,
            start_tokens=self.start_tokens,
        )


def initial_factors(
    planes: int, factor: float, original_length: int, base: float = 10000.0
) -> list[tuple[float, ...]]:
    """Returns Position Interpolation, YaRN and NTK-aware as factors."""
    dim = 2 * planes
    plain = RopeScaling("linear", 1.0).frequencies(dim, base)
    yarn = RopeScaling("yarn", factor, original_length).frequencies(dim, base)
    found = [np.full(planes, factor), np.asarray(plain / yarn, np.float64)]
    if planes > 1:
        found.append(factor ** ntk_exponents(dim))
    return [tuple(float(x) for x in np.maximum.accumulate(row)) for row in found]


def search(
    objective: Objective,
    *,
    factor: float,
    initial: Sequence[tuple[float, ...]],
    start_tokens: Sequence[int] = START_TOKENS,
    population: int = 64,
    parents: int = 32,
    mutations: int = 16,
    crossovers: int = 16,
    generations: int = 40,
    probability: float = 0.3,
    seed: int = 0,
) -> Found:
    """Returns the best factors that an evolutionary search finds.

    `lambda_i` in 1, 1.01 .. 1.25 s, never falling with `i`; start tokens from a list
    (algorithm 1). A generation keeps the best `parents`, and adds
    `mutations` of single ones and `crossovers` of two. The defaults are the paper's and
    its code's. The same seed gives the same result.

    Not as in the paper: a child is drawn within what its neighbours leave, or sorted,
    so that all are monotone, where the paper draws until one happens to be; nothing is
    evaluated twice.

    Args:
      objective: the loss of factors and start tokens; lower is better.
      factor: `s`, new length over old.
      initial: first candidates; see `initial_factors`.
      start_tokens: numbers of first positions that are not stretched.
      population: size of the first generation, mutations of `initial` among it.
      parents, mutations, crossovers, generations: see above.
      probability: of each plane to change in a mutation, or to cross over.
      seed: of the draws.

    Raises:
      ValueError: no initial candidates, of different lengths or out of range.
    """
    highest = int(np.floor(1.25 * factor * STEP + 1e-6))
    rng = np.random.default_rng(seed)
    first = [_candidate(row, start_tokens[0], highest) for row in initial]
    if not first or len({len(one.hundredths) for one in first}) != 1:
        raise ValueError(
            "initial needs at least one candidate, all with as many planes"
        )
    losses: dict[Candidate, float] = {}

    def add(child: Candidate) -> None:
        if child not in losses:
            losses[child] = float(objective(child.factors, child.start_tokens))

    def mutated(one: Candidate) -> Candidate:
        return _mutate(rng, one, highest, start_tokens, probability)

    for one in first:
        add(one)
    for _ in range(population - len(first)):
        add(mutated(first[rng.integers(len(first))]))
    history = [min(losses.values())]
    for _ in range(generations):
        # Ties in the order of evaluation, which the seed decides.
        best = sorted(losses, key=losses.__getitem__)[:parents]
        for _ in range(mutations):
            add(mutated(best[rng.integers(len(best))]))
        for _ in range(crossovers):
            mother, father = (best[i] for i in rng.integers(len(best), size=2))
            add(_cross(rng, mother, father, probability))
        history.append(min(losses.values()))
    best = min(losses, key=losses.__getitem__)
    return Found(
        best.factors, best.start_tokens, losses[best], tuple(history), len(losses)
    )


def _candidate(row, start: int, highest: int) -> Candidate:
    hundredths = tuple(int(round(x * STEP)) for x in row)
    good = all(STEP <= x <= highest for x in hundredths)
    if not good or list(hundredths) != sorted(hundredths):
        raise ValueError(
            f"factors must rise within 1 .. {highest / STEP}, got {tuple(row)}"
        )
    return Candidate(hundredths, start)


def _mutate(rng, one: Candidate, highest, start_tokens, probability) -> Candidate:
    """Draws some planes anew, each between its neighbours; perhaps the start tokens."""
    new = [STEP, *one.hundredths, highest]
    for i in range(1, len(new) - 1):
        if rng.random() < probability:
            new[i] = int(rng.integers(new[i - 1], new[i + 1] + 1))
    start = one.start_tokens
    if rng.random() < probability:
        start = int(rng.choice(start_tokens))
    return Candidate(tuple(new[1:-1]), start)


def _cross(rng, mother: Candidate, father: Candidate, probability) -> Candidate:
    """Takes some planes from the other parent."""
    swaps = rng.random(len(mother.hundredths)) < probability
    pairs = zip(mother.hundredths, father.hundredths, swaps, strict=True)
    child = sorted(theirs if swap else own for own, theirs, swap in pairs)
    start = father.start_tokens if rng.random() < probability else mother.start_tokens
    return Candidate(tuple(child), start)


@dataclasses.dataclass(frozen=True)
class RopeByFactors(Rope):
    """A rotary embedding that finds its factors among the parameters.

    So that one compiled program serves a whole search. Parameters: "factors" `[f]`, and
    "start_tokens", below which positions are not stretched.
    """

    def init_shared(self, key: jax.Array, dims: Dims) -> Params:
        planes = self.frequencies(dims.head_dim).shape[0]
        return {"factors": jnp.ones(planes), "start_tokens": jnp.zeros(())}

    def query(
        self, params: Params, q: Float[Array, "b t h d"], at: Where
    ) -> Float[Array, "b t h d"]:
        start = at.position[:, :, None] < params["start_tokens"]
        factors = jnp.where(start, 1.0, params["factors"][None, None])
        frequency = self.frequencies(q.shape[-1])[None, None] / factors
        return rotate(q, at.position, frequency, layout=self.layout)

    key = query


def model_objective(
    model: TransformerXL, tokens: Int[Array, "b t"], at: Where
) -> Objective:
    """Returns the mean loss of a model's next tokens, as a function of the factors.

    Compiled once. The attention factor is left out, as in the paper's search.

    Args:
      model: a model whose only position encoding is an unscaled `Rope`.
      tokens: documents of the new length, `[b t]`.
      at: where they stand.

    Raises:
      ValueError: another position encoding.
    """
    rope = model.config.position
    if type(rope) is not Rope or rope.scaling is not None:
        raise ValueError(f"the search needs a model with an unscaled Rope, got {rope}")
    fields = {f.name: getattr(rope, f.name) for f in dataclasses.fields(rope)}
    config = dataclasses.replace(
        model.config, position=RopeByFactors(**fields), dropout=0.0
    )
    searched = TransformerXL(config, key=jax.random.key(0))
    nnx.update(searched, nnx.state(model, nnx.Param))
    graphdef, params = nnx.split(searched)

    @jax.jit
    def loss(params, factors, start):
        searched = nnx.merge(graphdef, params)
        searched.position["factors"][...] = factors
        searched.position["start_tokens"][...] = start
        memory = searched.init_memory(tokens.shape[0], 0)
        logits, _ = searched(tokens, at, memory)
        scores = jax.nn.log_softmax(logits[:, :-1])
        found = jnp.take_along_axis(scores, tokens[:, 1:, None], axis=-1)[:, :, 0]
        same = at.segment[:, 1:] == at.segment[:, :-1]
        counted = same & (at.segment[:, 1:] != 0)
        return -jnp.sum(jnp.where(counted, found, 0.0)) / jnp.sum(counted)

    def objective(factors: tuple[float, ...], start_tokens: int) -> float:
        given = jnp.asarray(factors, jnp.float32), jnp.float32(start_tokens)
        return float(loss(params, *given))

    return objective

"""Parameter counts of published models beside the figures that their papers print."""

import re
from typing import NamedTuple

from ml_collections import ConfigDict

from relpos_jax import config as configs
from relpos_jax import positional
from relpos_jax.models import ModelConfig
from relpos_jax.models.decoder import count_parameters

_UNITS = {"M": 10**6, "B": 10**9}


class Published(NamedTuple):
    """What a paper says of one model.

    Attributes:
      vocabulary: ids of the model that it trained.
      parameters: their number as printed, `41 M` or `0.46 B`.
      figure: its result, with the number of the table.
      note: why the configuration's count prints differently, if it does.
    """

    vocabulary: int
    parameters: str
    figure: str
    note: str = ""


class Count(NamedTuple):
    """A configuration's count beside the published one.

    Attributes:
      name: file and variant of the configuration.
      count: parameters, from shapes alone.
      printed: the count with the published one's digits.
      published: what the paper says.
    """

    name: str
    count: int
    printed: str
    published: Published

    @property
    def equal(self) -> bool:
        """Whether the counts agree in the printed digits."""
        return self.printed == self.published.parameters

    @property
    def verdict(self) -> str:
        """`equal`, or that they differ and whether the reason is known."""
        if self.equal:
            return "equal"
        return "differs, see note" if self.published.note else "differs"


def model_of(config: ConfigDict, vocabulary: int) -> ModelConfig:
    """Returns the model of a config whose vocabulary is not the one of bytes.

    Args:
      config: with a section `model`, as `config.build` takes it.
      vocabulary: number of ids.

    Raises:
      ValueError, TypeError: what `config.take` raises.
    """
    section = config.model.to_dict()
    position = section.pop("position")
    encoding = positional.make(position["name"], **position["knobs"])
    given = {"vocabulary": vocabulary, "position": encoding}
    return configs.take(section, ModelConfig, "model", **given)


def like(count: int, printed: str) -> str:
    """Returns a count rounded to the digits of a printed one: `41 M`, `0.46 B`.

    Raises:
      ValueError: what is printed is no number of millions or billions.
    """
    found = re.fullmatch(r"(\d+)(?:\.(\d+))? ([MB])", printed)
    if not found:
        raise ValueError(f"{printed!r} is not written like '41 M' or '0.46 B'")
    digits = len(found.group(2) or "")
    return f"{count / _UNITS[found.group(3)]:.{digits}f} {found.group(3)}"


def compare(name: str, config: ConfigDict, published: Published) -> Count:
    """Returns a configuration's count beside the published one; allocates nothing."""
    count = count_parameters(model_of(config, published.vocabulary))
    return Count(name, count, like(count, published.parameters), published)


def table(rows: list[Count]) -> str:
    """Returns the counts as a Markdown table."""
    lines = [
        "| config | count | ours | published | verdict | result |",
        "|---|---|---|---|---|---|",
    ]
    for row in rows:
        said = row.published
        cells = (row.printed, said.parameters, row.verdict, said.figure)
        lines.append(f"| {row.name} | {row.count:,} | {' | '.join(cells)} |")
    return "\n".join(lines)

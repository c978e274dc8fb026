"""The choices that make a model."""

import dataclasses

from relpos_jax.attention.hierarchy import Within
from relpos_jax.attention.patterns import check_sense
from relpos_jax.masks import Bidirectional, Causal, Mask, Window
from relpos_jax.memory.compression import CompressiveConfig
from relpos_jax.models.adaptive import AdaptiveConfig
from relpos_jax.positional.protocol import Dims, Params, PositionEncoding

ABSOLUTE_WITH_MEMORY = (
    "absolute position embeddings cannot be used with memory: a token's memory "
    "carries the position that it had in its own segment, so a token of this segment "
    "and one of the last would claim the same place (Dai et al. 2019, section 3.3). "
    "Use a relative encoding, or memory length 0"
)

CAUSAL_ONLY = (
    "is defined for keys at or before the query only, and bidirectional attention also "
    "looks ahead. Use an encoding that has both directions (`causal_only` is False)"
)


@dataclasses.dataclass(frozen=True)
class Hierarchy:
    """Two levels of attention a layer: see docs/sparse_attention.md.

    A layer attends within segments, by the model's own `position`, and then across the
    summaries of earlier segments, with projections of its own.

    Attributes:
      segment: positions a segment, counted from position 0 of a document.
      position: the encoding across segments; its positions are numbers of segments.
    """

    segment: int
    position: PositionEncoding


@dataclasses.dataclass(frozen=True)
class ModelConfig:
    """A decoder: Transformer-XL, or a plain transformer where `memory_length` is 0.

    With `bidirectional`, an encoder.

    Attributes:
      vocabulary: number of token ids.
      layers, width, heads, head_dim, feedforward: sizes; `heads * head_dim` need not be
        `width`.
      position: the position encoding, or a tuple of them: a pattern that is repeated
        over the layers, `(rope, none)`, and cut off where they end.
      norm: "pre" normalises the input of each sub-layer, "post" the sum behind it.
      final_norm: normalise the last layer's output; None for where `norm` is "pre" (the
        released Transformer-XL code has none in either case).
      norm_kind: "layer", or "rms", without mean and bias (T5, LLaMA).
      activation: of the feed-forward layers: "gelu" (tanh form), "gelu_exact" (BERT,
        DeBERTa), "relu", or gated, "geglu" (T5 1.1) and "swiglu" (LLaMA).
      attention_bias, feedforward_bias: biases of the projections.
      bidirectional: attend to both sides, as an encoder; excludes memory.
      share_position: one set of an encoding's shared parameters for all layers that
        have it; else each layer has its own (what is added to the embeddings is
        shared all the same).
      embedding_norm: normalise the embeddings, positions added (BERT, DeBERTa).
      output_transform: a projection, the activation and a norm in front of an
        encoder's logits (BERT's head).
      tie_embeddings: use the embedding matrix as the output projection.
      output_bias: add a bias per token id to the logits.
      dropout: rate on embeddings, sub-layer outputs and inner feed-forward units.
      attention_dropout: rate on attention weights (`dropatt` of the released code).
      memory_length: slots of segment memory in training.
      window: a query sees this many keys on each side that it looks at, itself among
        them; None for all
        (`same_length` of the released PyTorch code is `window = memory_length`).
      pattern: which keys a query sees, a causal mask of `relpos_jax.masks` or
        `attention.patterns`, or a tuple of them that the layers take in turn; instead
        of `window`. None for all.
      hierarchy: attend within segments and then across their summaries, instead of
        `window` and `pattern`; None for a single level.
      dtype: of the computation; parameters are float32.
      attention: implementation, see `relpos_jax.attention.attend`.
      remat: compute each layer again in the backward pass instead of keeping what is
        inside it (`jax.checkpoint`): less memory, a forward pass more, the same
        numbers to rounding.
      init_std: standard deviation of all initial matrices; None for 1/sqrt(fan in).
      adaptive: clusters of the embedding and the softmax (`tie_embeddings` ties their
        tables, `output_bias` gives all of the softmax biases); None for a plain one.
      memory_start: what a document's first tokens look back on. "empty": nothing.
        "zeros": `memory_length` zero vectors at the positions before 0, which are
        attended like any state (Hugging Face's port).
      norm_epsilon: of all layer norms.
      compressive: slots of compressed memory behind segment memory, and how they are
        made; None for none.
    """

    vocabulary: int
    layers: int
    width: int
    heads: int
    head_dim: int
    feedforward: int
    position: PositionEncoding | tuple[PositionEncoding, ...]
    norm: str = "pre"
    final_norm: bool | None = None
    activation: str = "gelu"
    tie_embeddings: bool = True
    output_bias: bool = False
    dropout: float = 0.0
    attention_dropout: float = 0.0
    memory_length: int = 0
    window: int | None = None
    dtype: str = "float32"
    attention: str = "auto"
    remat: bool = False
    init_std: float | None = None
    adaptive: AdaptiveConfig | None = None
    memory_start: str = "empty"
    norm_epsilon: float = 1e-5
    norm_kind: str = "layer"
    attention_bias: bool = False
    feedforward_bias: bool = True
    bidirectional: bool = False
    share_position: bool = True
    embedding_norm: bool = False
    output_transform: bool = False
    pattern: Mask | tuple[Mask, ...] | None = None
    hierarchy: Hierarchy | None = None
    compressive: CompressiveConfig | None = None

    def __post_init__(self):
        if isinstance(self.position, (tuple, list)):
            pattern = tuple(self.position)
            if not pattern:
                raise ValueError("position is an empty pattern; give an encoding")
            # A pattern of one encoding is that encoding: equal models, equal names.
            single = all(encoding == pattern[0] for encoding in pattern)
            object.__setattr__(self, "position", pattern[0] if single else pattern)
        for name in ("vocabulary", "layers", "width", "heads", "head_dim"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name} must be positive, got {getattr(self, name)}")
        choices = {
            "norm": ("pre", "post"),
            "norm_kind": ("layer", "rms"),
            "activation": ("gelu", "gelu_exact", "relu", "geglu", "swiglu"),
            "dtype": ("float32", "bfloat16", "float16"),
            "memory_start": ("empty", "zeros"),
        }
        for name, known in choices.items():
            if getattr(self, name) not in known:
                raise ValueError(
                    f"{name} must be one of {known}, got {getattr(self, name)!r}"
                )
        for name in ("dropout", "attention_dropout"):
            if not 0 <= getattr(self, name) < 1:
                value = getattr(self, name)
                raise ValueError(f"{name} must be in [0, 1), got {value}")
        if self.memory_length < 0:
            raise ValueError(f"memory_length is negative: {self.memory_length}")
        if self.norm_epsilon <= 0:
            raise ValueError(f"norm_epsilon must be positive, got {self.norm_epsilon}")
        if self.adaptive is not None:
            self.adaptive.check(self.vocabulary, self.width)
        if self.absolute and self.memory_slots:
            raise ValueError(ABSOLUTE_WITH_MEMORY)
        if self.compressive is not None:
            self._check_compressive()
        if self.bidirectional:
            self._check_bidirectional()
        elif self.output_transform:
            raise ValueError("output_transform belongs to an encoder: bidirectional")

        self._check_pattern()

    def _check_bidirectional(self):
        if self.memory_slots:
            raise ValueError(
                f"bidirectional excludes memory (memory_length={self.memory_length}, "
                f"compressive={self.compressive}): "
                "what a memory holds has not seen what comes after it"
            )
        for encoding in self.encodings:
            if encoding.causal_only:
                raise ValueError(f"{encoding} {CAUSAL_ONLY}")

    def _check_compressive(self):
        if self.memory_start == "zeros":
            raise ValueError(
                "memory_start='zeros' is segment memory's alone: compressed memory "
                "begins empty. Set memory_start='empty', or compressive=None"
            )
        if self.hierarchy is not None:
            raise ValueError(
                "compressive excludes hierarchy: summaries are means of tokens, and a "
                "compressed slot is none. Set one of them to None"
            )

    def _check_pattern(self):
        names = ("window", "pattern", "hierarchy")
        given = [name for name in names if getattr(self, name) is not None]
        if len(given) > 1:
            values = " and ".join(f"{name}={getattr(self, name)}" for name in given)
            raise ValueError(f"{values} both say which keys are seen: set one of them")
        if isinstance(self.pattern, (tuple, list)):
            if not self.pattern:
                raise ValueError("pattern is an empty tuple; give a mask, or None")
            object.__setattr__(self, "pattern", tuple(self.pattern))
        for mask, encoding in zip(self.masks, self.positions, strict=True):
            if mask.causal == self.bidirectional:
                raise ValueError(
                    f"{mask} has causal={mask.causal} in a model with "
                    f"bidirectional={self.bidirectional}: a language model must not "
                    "see what it is to predict, and an encoder looks to both sides"
                )
            check_sense(encoding, mask)

    @property
    def memory_slots(self) -> int:
        """All slots that tokens look back on: of segment and compressed memory."""
        more = 0 if self.compressive is None else self.compressive.length
        return self.memory_length + more

    @property
    def positions(self) -> tuple[PositionEncoding, ...]:
        """Each layer's encoding."""
        pattern = self.position
        if not isinstance(pattern, tuple):
            pattern = (pattern,)
        return tuple(pattern[i % len(pattern)] for i in range(self.layers))

    @property
    def encodings(self) -> tuple[PositionEncoding, ...]:
        """The encodings that differ, in the order of their first layers.

        Layers of equal encodings share one set of `init_shared` parameters, and each of
        these encodings acts once on the token embeddings.
        """
        return tuple(dict.fromkeys(self.positions))

    def shares(self, encoding: PositionEncoding) -> bool:
        """Returns whether layers share the encoding's `init_shared` parameters."""
        return self.share_position or encoding.absolute

    def shared_part(self, shared: Params, encoding: PositionEncoding) -> Params:
        """Returns one encoding's part of the parameters that layers share.

        With one encoding that is all of them; otherwise they stand under the encoding's
        number in `encodings`.
        """
        if len(self.encodings) == 1:
            return shared
        return shared.get(str(self.encodings.index(encoding)), {})

    @property
    def absolute(self) -> bool:
        """Whether any encoding adds to the token embeddings."""
        return any(encoding.absolute for encoding in self.encodings)

    def past_training(self) -> str:
        """Says what happens past the training length, for each encoding."""
        return " ".join(
            dict.fromkeys(encoding.past_training() for encoding in self.encodings)
        )

    @property
    def dims(self) -> Dims:
        """The sizes that position parameters depend on."""
        return Dims(self.heads, self.head_dim, self.width)

    @property
    def masks(self) -> tuple[Mask, ...]:
        """Which pairs attend in each layer."""
        pattern = self.pattern
        if self.hierarchy is not None:
            pattern = Within(self.hierarchy.segment)
        if pattern is None:
            pattern = Bidirectional() if self.bidirectional else Causal()
            if self.window is not None:
                pattern = Window(self.window, causal=not self.bidirectional)
        if not isinstance(pattern, tuple):
            pattern = (pattern,)
        return tuple(pattern[i % len(pattern)] for i in range(self.layers))

    @property
    def reach(self) -> int | None:
        """How many keys back any layer looks, the query's own being 1; None: to all."""
        if self.hierarchy is not None:
            return None
        reaches = [mask.reach for mask in self.masks]
        return None if None in reaches else max(reaches)

    @property
    def sublayers(self) -> int:
        """Attentions of a layer that keep something in memory."""
        return 1 if self.hierarchy is None else 2

    @property
    def attentions(self) -> int:
        """Attentions of the model that keep something in memory."""
        return self.layers * self.sublayers

    @property
    def has_final_norm(self) -> bool:
        """Whether the last layer's output is normalised."""
        return self.norm == "pre" if self.final_norm is None else self.final_norm


def same_length(memory_length: int, count: str = "pytorch") -> int:
    """Returns the `window` that is `same_length` of the released Transformer-XL code.

    There every query sees the same number of keys, itself among them. It follows the
    memory: a model evaluated with another `memory_length` needs another `window`.

    Args:
      memory_length: slots of memory.
      count: "pytorch" (and Hugging Face's port): `memory_length` keys. "tensorflow":
        one more, so that the first query sees the oldest slot.

    Raises:
      ValueError: an unknown count, or a memory without slots.
    """
    if count not in ("pytorch", "tensorflow"):
        raise ValueError(f"count must be 'pytorch' or 'tensorflow', got {count!r}")
    if memory_length < 1:
        raise ValueError(f"same_length needs memory, got length {memory_length}")
    return memory_length + (count == "tensorflow")

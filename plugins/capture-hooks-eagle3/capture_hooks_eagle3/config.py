"""Settings of an EAGLE-3 head: its architecture, its objective, and how it starts."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, fields, replace
from typing import Annotated, Any, Literal, Self

from pydantic import Field

from capture_hooks.capture.anatomy import Anatomy
from capture_hooks.errors import HeadError
from capture_hooks.settings import check_fields

from .rope import PER_PAIR

#: What transformers' configurations call the longest sequence.
_LENGTHS = ("max_position_embeddings", "n_positions", "max_seq_len", "seq_length")
#: How the names begin of layers that see a part of the context, or a summary of it.
_PARTLY = ("sliding", "chunked", "linear", "local")


#: More than any tensor has.
Size = Annotated[int, Field(ge=1, lt=2**31)]


@dataclass(frozen=True, slots=True)
class Sizes:
    """The architecture's numbers, all known; see `Eagle3Config`."""

    heads: int
    kv_heads: int
    head_dim: int
    intermediate_size: int
    rms_norm_eps: float
    rope: Mapping[str, Any]
    max_position_embeddings: int


@dataclass(frozen=True, slots=True)
class Eagle3Config:
    """Everything that decides what a head computes; ``None`` means "as the target has it".

    Attributes:
        layers: decoder layers; layer 0 attends on ``[embedding, hidden]``, the others are Llama's.
        heads, kv_heads, head_dim: attention shape; query heads share key/value heads in groups.
        intermediate_size: width of the SwiGLU MLP.
        rms_norm_eps: epsilon of every norm; 1e-6 for a target that names none.
        rope: RoPE settings as transformers writes them (``rope_type``, ``rope_theta``, ...).  A
            target without RoPE gives the head ``default`` with theta 10000, RoPE's original value; one whose
            settings hold for a part of each attention head's channels gives it ``default`` with its theta.
        max_position_embeddings: longest sequence the head is meant for.
        norm_before_residual: layer 0's residual is ``hidden_norm(h)`` instead of ``h``.
        norm_before_fc: one RMSNorm over the whole concatenation before ``fc`` (``input_norm``).
        fc_norm: one RMSNorm per input before ``fc`` (EAGLE-3.1).
        norm_output: what is fed back is the output after ``norm`` (EAGLE-3.1).

        steps: training-time-test steps J.
        step_decay: the objective's factor of step j is ``step_decay ** j``.
        outside: rows whose target arg-max lies outside the draft vocabulary.  ``skip``: weight 0 in
            the loss, as in SafeAILab/EAGLE and SpecForge.  ``renormalise``: they teach the target's
            distribution renormalised to the draft vocabulary.  Either way they count as misses.
        feature_noise: in training, each captured value is multiplied by ``1 + noise * N(0, 1)``.

        scale_inputs: whether `Eagle3Head.calibrate` may scale each captured channel to rms 1
            (folded into ``fc`` on export; a few channels of a language model are huge).
        lm_head_init: ``target`` starts from the target's rows of the draft vocabulary.
        train_lm_head: whether ``lm_head`` learns.
        norm_init: ``norm`` starts as the target's final norm times this.
        train_embedding: whether the head owns and trains a copy of the embedding.
        init_layer: the target's layer whose weights start layer 0 (None: random; may be negative).
    """

    layers: Annotated[int, Field(ge=1, le=1000)] = 1
    heads: Size | None = None
    kv_heads: Size | None = None
    head_dim: Size | None = None
    intermediate_size: Size | None = None
    rms_norm_eps: Annotated[float, Field(ge=0, le=1)] | None = None
    rope: Mapping[str, Any] | None = None
    max_position_embeddings: Size | None = None
    norm_before_residual: bool = False
    norm_before_fc: bool = False
    fc_norm: bool = False
    norm_output: bool = False

    steps: Annotated[int, Field(ge=1, le=1000)] = 4
    step_decay: Annotated[float, Field(gt=0, le=1)] = 0.8
    outside: Literal["skip", "renormalise"] = "skip"
    feature_noise: Annotated[float, Field(ge=0, le=100)] = 0.1

    scale_inputs: bool = True
    lm_head_init: Literal["target", "random"] = "target"
    train_lm_head: bool = False
    norm_init: float = 0.15
    train_embedding: bool = False
    init_layer: int | None = None

    def __post_init__(self) -> None:
        check_fields(self, HeadError, "eagle3: ")
        if self.heads is not None and self.kv_heads is not None and self.heads % self.kv_heads:
            raise HeadError(
                f"eagle3: heads = {self.heads} is no multiple of kv_heads = {self.kv_heads}; "
                "each key/value head serves the same number of query heads"
            )
        if self.head_dim is not None and self.head_dim % 2:
            raise HeadError(f"eagle3: head_dim = {self.head_dim} must be even (RoPE turns pairs of channels)")
        if self.norm_before_fc and self.fc_norm:
            raise HeadError("eagle3: norm_before_fc and fc_norm exclude each other; set one")

    def sizes(self) -> Sizes:
        """The architecture's numbers.

        Raises:
            HeadError: when one is still to be taken from a target.
        """
        values = {field.name: getattr(self, field.name) for field in fields(Sizes)}
        if missing := [name for name, value in values.items() if value is None]:
            raise HeadError(
                f"eagle3: {', '.join(missing)} not given; set them or fill them from a target with filled()"
            )
        return Sizes(**values)

    def filled(self, anatomy: Anatomy) -> Self:
        """The same settings with every ``None`` of the architecture taken from the target.

        Raises:
            HeadError: naming a setting that the target's configuration does not give.
        """
        text = _text_config(anatomy)
        target = _layer_config(text)
        heads = self.heads or _read(target, "heads", "num_attention_heads", "n_head", "n_heads")
        head_dim = self.head_dim or getattr(target, "head_dim", None) or anatomy.hidden_size // heads
        kv_heads = self.kv_heads or getattr(target, "num_key_value_heads", None) or heads
        if heads % kv_heads:
            kv_heads = heads
        head_dim += head_dim % 2
        return replace(
            self,
            heads=heads,
            kv_heads=kv_heads,
            head_dim=head_dim,
            intermediate_size=self.intermediate_size
            or _int(getattr(target, "intermediate_size", None))
            or 4 * anatomy.hidden_size,
            rms_norm_eps=self.rms_norm_eps or _norm_eps(target),
            rope=dict(self.rope) if self.rope is not None else _rope(text, head_dim),
            max_position_embeddings=self.max_position_embeddings
            or _read(target, "max_position_embeddings", *_LENGTHS),
        )


def _text_config(anatomy: Anatomy) -> Any:
    config = getattr(anatomy.model, "config", None)
    if config is not None and hasattr(config, "get_text_config"):
        return config.get_text_config(decoder=True)
    return config


def _kind_of_layer(config: Any) -> str | None:
    """The type of layer that a head is like, where a target has several: it attends to the whole context."""
    kinds = dict.fromkeys(getattr(config, "layer_types", None) or ())
    whole = [kind for kind in kinds if "attention" in kind and not kind.startswith(_PARTLY)]
    return next((kind for kind in ("full_attention", *whole) if kind in kinds), None)


def _layer_config(config: Any) -> Any:
    """The settings of the last such layer where they vary by layer, as in Gemma 4; else those of all layers.

    transformers 5.24 lets no setting that varies be read from the whole configuration
    (integrations/heterogeneity/configuration_utils.py).
    """
    if not getattr(config, "is_heterogeneous", False):
        return config
    kinds, kind = list(getattr(config, "layer_types", None) or ()), _kind_of_layer(config)
    like = [k for k, found in enumerate(kinds) if found == kind]
    return config.per_layer_config[like[-1] if like else config.num_hidden_layers - 1]


def _int(value: Any) -> int | None:
    return value if isinstance(value, int) else None


def _read(config: Any, setting: str, *names: str) -> int:
    for name in names:
        value = _int(getattr(config, name, None))
        if value is not None:
            return value
    raise HeadError(
        f"eagle3: the target's configuration has none of {', '.join(names)}; set {setting} in Eagle3Config"
    )


def _norm_eps(config: Any) -> float:
    for name in ("rms_norm_eps", "layer_norm_eps", "layer_norm_epsilon", "norm_epsilon", "layernorm_epsilon"):
        value = getattr(config, name, None)
        if isinstance(value, float):
            return value
    return 1e-6


def _rope(config: Any, head_dim: int) -> dict[str, Any]:
    """The target's RoPE settings; those of its full-attention layers where they differ by layer.

    A head turns all its channels.  Of a target that turns a part of them, settings that were made for that
    part (LongRoPE's factor for each pair, as in Phi-4-mini; Gemma 4's ``proportional``) are left out: the
    head takes ``default`` with the target's theta.

    Of an M-RoPE target (Qwen2.5-VL) the head keeps one axis, the row's number: without ``mrope_section`` in
    its config SGLang 0.5.23 counts rows (``models/llama_eagle3.py``), and vLLM 0.32 takes the target's first
    axis, which is the same in text (``v1/spec_decode/llm_base_proposer.py``, ``_set_positions``).
    """
    settings = getattr(config, "rope_parameters", None) or {}
    if by_kind := {kind: value for kind, value in settings.items() if isinstance(value, Mapping)}:
        settings = by_kind.get(_kind_of_layer(config) or "", next(iter(by_kind.values())))
    rope = {
        key: value for key, value in settings.items() if key not in ("mrope_section", "partial_rotary_factor")
    }
    per_pair = [rope[key] for key in PER_PAIR if isinstance(rope.get(key), list)]
    if any(len(factors) != head_dim // 2 for factors in per_pair) or rope.get("rope_type") == "proportional":
        rope = {key: value for key, value in rope.items() if key == "rope_theta"}
    if rope.get("rope_type", "default") in ("mrope", "default"):
        rope["rope_type"] = "default"
    rope.setdefault("rope_theta", getattr(config, "rope_theta", None) or 10000.0)
    return rope

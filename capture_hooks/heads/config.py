"""A head's ``config.json``: what each library reads, and the ``capture`` section that gives it a meaning."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Final, Literal

from pydantic import BaseModel, ConfigDict, Field, ValidationError
from torch import Tensor

from ..capture.anatomy import Anatomy
from ..capture.fingerprint import TargetFingerprint
from ..errors import HeadError, SpecError
from ..spec import CaptureSpec, Point
from .engines import EngineStatement, sglang_ids, vllm_ids
from .schema import HeadSchema

#: Version of the ``capture`` section; a reader refuses versions it does not know.
FORMAT: Final = 1


class WitnessFile(BaseModel):
    """Where the witness lies and what it must hash to."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    file: str
    tokens: int = Field(ge=1)
    sha256: str


class CaptureSection(BaseModel):
    """The ``capture`` section: what the integers beside it mean."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    format: Literal[1] = FORMAT
    written_by: str = Field(description="library and version")
    head: str = Field(description="name of the head provider that reads the tensors")
    spec: dict[str, Any] = Field(description="the capture spec, inputs in the trainer's order")
    order: list[int] = Field(description="input order[i] of the spec is input i of the file")
    file_inputs: list[str] = Field(description="the inputs in the file's order: ascending depth")
    target: TargetFingerprint
    engines: list[EngineStatement]
    weights_sha256: str = Field(description="SHA-256 of model.safetensors")
    witness: WitnessFile

    @property
    def capture_spec(self) -> CaptureSpec:
        """The spec as an object."""
        return CaptureSpec.from_json(self.spec)


def compose(
    schema: HeadSchema,
    fields: Mapping[str, Any],
    anatomy: Anatomy,
    inputs: int,
    engines: tuple[EngineStatement, ...],
    section: CaptureSection,
    tensors: Mapping[str, Tensor],
) -> dict[str, Any]:
    """The whole document, from the head's own fields and its target.

    Raises:
        HeadError: the head leaves out a field that stock readers need.
    """
    missing = [name for name in schema.required if fields.get(name) is None]
    if not missing and not any(fields.get(name) for name in schema.rope_keys):
        missing = [schema.rope_keys[0]]
    if missing:
        raise HeadError(f"the head {section.head!r} exports no {', '.join(missing)}; stock readers need it")
    by_engine = {statement.engine: statement for statement in engines}
    target = text_config(anatomy)
    rope = fields.get("rope_parameters") or schema.rope(fields, f"the head {section.head!r}")
    dtype = str(next(t.dtype for t in tensors.values() if t.is_floating_point())).removeprefix("torch.")
    document: dict[str, Any] = {
        # A top-level `norm_output: false` reads "no norm at all" to SpecForge 0.2.0, and leaving it out reads
        # "false" to SGLang and vLLM; so false is said only in `eagle_config`.
        **{name: fields[name] for name in schema.required if name != "norm_output" or fields[name]},
        **schema.rope_spellings(rope),
        # Only to name them: a server takes its stop tokens from the target.
        "bos_token_id": getattr(target, "bos_token_id", None),
        "eos_token_id": getattr(target, "eos_token_id", None),
        "pad_token_id": getattr(target, "pad_token_id", None),
        # A copied `true` makes SGLang take the embedding for the draft's lm_head.
        "tie_word_embeddings": False,
        "vocab_size": anatomy.vocab_size,
        "target_hidden_size": anatomy.hidden_size,
        "num_aux_hidden_states": inputs,
        # Both names: transformers reads `dtype` since 4.56, and `torch_dtype` before.
        "dtype": dtype,
        "torch_dtype": dtype,
        "use_cache": True,
        "eagle_aux_hidden_state_layer_ids": vllm_ids(by_engine["vllm"]),
        "eagle_config": {
            "use_aux_hidden_state": True,
            "eagle_aux_hidden_state_layer_ids": sglang_ids(by_engine["sglang"]),
            "norm_before_fc": fields["norm_before_fc"],
            "norm_output": fields["norm_output"],
        },
    }
    document |= {
        name: value for name, value in fields.items() if name not in document and name not in schema.required
    }
    return document | {"capture": section.model_dump(mode="json")}


def read_section(config: Mapping[str, Any], where: str) -> CaptureSection | None:
    """The ``capture`` section of a config, or None where there is none.

    Raises:
        HeadError: it is of an unknown format, or a field is missing or wrong.
    """
    if "capture" not in config:
        return None
    section = config["capture"]
    if not isinstance(section, dict):
        raise HeadError(f"{where}: capture is {section!r}; it must be an object")
    if section.get("format") != FORMAT:
        raise HeadError(
            f"{where}: its capture section has format {section.get('format')!r}, "
            f"and this version reads {FORMAT}; update capture-hooks"
        )
    try:
        read = CaptureSection.model_validate(section)
        read.capture_spec  # noqa: B018 - a spec that does not parse is an error here, not later
    except ValidationError as error:
        first = error.errors()[0]
        field = ".".join(str(part) for part in ("capture", *first["loc"]))
        raise HeadError(f"{where}: {field}: {first['msg']} (got {first['input']!r})") from None
    except SpecError as error:
        raise HeadError(f"{where}: capture.spec: {error}") from None
    return read


def number(config: Mapping[str, Any], name: str, where: str) -> int:
    """A whole number of the config.

    Raises:
        HeadError: it is missing or no whole number.
    """
    value = config.get(name)
    if not isinstance(value, int) or isinstance(value, bool):
        raise HeadError(f"{where}: {name} is {value!r}; a whole number is needed")
    return value


def text_config(anatomy: Anatomy) -> Any:
    """The target's configuration of its text decoder."""
    config = getattr(anatomy.model, "config", None)
    find = getattr(config, "get_text_config", None)
    return config if find is None else find(decoder=True)


def model_type(anatomy: Anatomy) -> str:
    """The target's ``model_type``, by which SGLang picks the meaning of the ids."""
    return str(getattr(getattr(anatomy.model, "config", None), "model_type", "") or "")


def depth_order(spec: CaptureSpec, n_layers: int) -> tuple[int, ...]:
    """Indices of ``spec.inputs`` by ascending depth: input ``order[i]`` becomes input i of the file.

    SGLang and vLLM capture while the layers run and concatenate in that order, whatever the order of
    the ids they were given.  The final norm lies after every boundary; module points (``in:``,
    ``out:``), which no server captures, come last in the spec's own order.

    >>> depth_order(CaptureSpec.parse("post.6, embed, post.2"), 8)
    (1, 2, 0)
    """

    def depth(index: int) -> tuple[int, int, bool]:
        point = spec.inputs[index]
        site = point.resolve(n_layers)
        if site.boundary is not None:
            # Where a model adds something between two layers, post.k comes before pre.(k+1).
            return (0, site.boundary, point.kind == "pre")
        return (1 if site.norm else 2, 0, False)

    return tuple(sorted(range(len(spec.inputs)), key=depth))


def in_order(spec: CaptureSpec, order: Sequence[int]) -> tuple[Point, ...]:
    """The inputs as the file orders them."""
    return tuple(spec.inputs[index] for index in order)


def check_order(spec: CaptureSpec, order: Sequence[int], file_inputs: Sequence[str], where: str) -> None:
    """Check a file's permutation against the points it lists.

    Raises:
        HeadError: naming both values.
    """
    if sorted(order) != list(range(len(spec.inputs))):
        raise HeadError(
            f"{where}: capture.order {list(order)} is no permutation of the {len(spec.inputs)} inputs {spec}"
        )
    points = [str(point) for point in in_order(spec, order)]
    if points != list(file_inputs):
        raise HeadError(
            f"{where}: capture.order {list(order)} puts the inputs in the order {', '.join(points)}, "
            f"and capture.file_inputs says {', '.join(file_inputs)}"
        )

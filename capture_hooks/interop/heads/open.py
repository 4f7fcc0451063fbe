"""Opening a head's directory, whoever wrote it: its config and headers, not its weights; no target needed.

The tensors may lie in one safetensors file, whatever its name, or in several with an index.  Files that
``torch.save`` wrote count on request, where there are no others.  Names of tensors are brought to one form
(`HeadSchema.canonical`), values are not touched.
"""

from __future__ import annotations

import dataclasses
import json
import os
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final, Literal

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from ...errors import HeadError, StoreError
from ...heads.checkpoint import installed_heads
from ...heads.config import CaptureSection, read_section
from ...heads.files import WEIGHTS, TensorInfo, check_finite, read_config
from ...heads.schema import HeadSchema
from ...io import check_regular
from .. import pickles as pickle_files
from .header import read_header

#: *capture-hooks*: with a capture section.  *speculators*: with ``speculators_model_type``.  *eagle*:
#: ``midlayer.*`` (SafeAILab/EAGLE, SpecForge).  *modelopt*: ``layers.0.*`` beside a plain config (ModelOpt).
Layout = Literal["capture-hooks", "speculators", "modelopt", "eagle"]


#: Where speculators keeps the draft's Llama-style fields.
NESTED: Final = "transformer_layer_config"
INDEX: Final = WEIGHTS + ".index.json"
#: What transformers called them before safetensors, and what SafeAILab's EAGLE heads are called.
PICKLE: Final = "pytorch_model.bin"
PICKLE_INDEX: Final = PICKLE + ".index.json"
_PICKLES: Final = ("*.bin", "*.pt", "*.pth", "*.ckpt")
#: Largest index that is read: a head has some dozens of tensors.
_LONGEST: Final = 1 << 22
#: As in the header of a safetensors file; what else torch has is no weight or map of a head.
_NAMES: Final = {
    torch.float64: "F64",
    torch.float32: "F32",
    torch.float16: "F16",
    torch.bfloat16: "BF16",
    torch.float8_e4m3fn: "F8_E4M3",
    torch.float8_e5m2: "F8_E5M2",
    torch.int64: "I64",
    torch.int32: "I32",
    torch.int16: "I16",
    torch.int8: "I8",
    torch.uint8: "U8",
    torch.bool: "BOOL",
}


@dataclass(frozen=True, slots=True)
class HeadFlags:
    """What a head computes, as far as its file says; None where it does not say.

    What each means is the schema's to say.  ``norm_before_lm_head`` is what SpecForge 0.2.0 calls
    ``norm_output`` (``modeling/draft/llama3_eagle.py:1690,1773``), so in layout *eagle* a top-level
    ``norm_output`` can be either: both are None then, and ``RawHead.fields["norm_output"]`` has it.
    """

    norm_before_residual: bool | None = None
    norm_before_fc: bool | None = None
    fc_norm: bool | None = None
    norm_output: bool | None = None
    norm_before_lm_head: bool | None = None
    use_aux_hidden_state: bool | None = None


@dataclass(frozen=True, slots=True)
class Stored:
    """Where a tensor lies: its file and the name it has in it."""

    file: Path
    name: str


def read_stored(path: Path, names: Sequence[str]) -> dict[str, Tensor]:
    """Tensors of one file by the names they have in it, on the CPU, bits as in the file.

    Raises:
        HeadError: it is damaged, or changed since it was looked into.
    """
    if path.suffix != ".safetensors":
        held = read_pickled(path)
        if lost := [name for name in names if name not in held]:
            raise HeadError(f"{path} was changed while it was read: {lost[0]} is gone")
        return {name: held[name] for name in names}
    try:
        with safe_open(path, framework="pt") as file:
            return {name: file.get_tensor(name) for name in names}
    except (OSError, SafetensorError) as error:
        raise HeadError(f"{path} is damaged, truncated or no safetensors file: {error}") from None


@dataclass(frozen=True, slots=True)
class RawHead:
    """A head's directory, read from its config and its files' headers alone.

    Attributes:
        layout: whose names and nesting it has.
        kind: name of the head provider whose file it is.
        schema: what that provider says of its files.
        directory: where it lies.
        config: the whole ``config.json`` as it stands.
        fields: the draft's Llama-style fields, flattened out of ``transformer_layer_config`` where they are
            nested; values as they stand, nothing filled in.
        flags: what it computes, as far as it says.
        ids: every list of layer ids, by dotted key, as it stands (of whatever type).
        tensors: shape and dtype by canonical name.
        names: file and name in it, by canonical name.
        section: the capture section; None in other libraries' heads.
        problems: what no reader could make sense of, a sentence each (a flag that is no boolean, ...).
    """

    layout: Layout
    kind: str
    schema: HeadSchema
    directory: Path
    config: Mapping[str, Any]
    fields: Mapping[str, Any]
    flags: HeadFlags
    ids: Mapping[str, Any]
    tensors: Mapping[str, TensorInfo]
    names: Mapping[str, Stored]
    section: CaptureSection | None
    problems: tuple[str, ...] = ()

    def read(self) -> dict[str, Tensor]:
        """Every tensor by canonical name, on the CPU, bits as in the file.

        Raises:
            HeadError: a file is damaged or changed since, or a tensor holds NaN or infinity.
        """
        found: dict[str, Tensor] = {}
        for path in sorted({stored.file for stored in self.names.values()}):
            here = {name: stored.name for name, stored in self.names.items() if stored.file == path}
            tensors = read_stored(path, tuple(here.values()))
            found |= {name: tensors[own] for name, own in here.items()}
        check_finite(found, str(self.directory))
        return found


def open_head(directory: str | os.PathLike[str], *, pickles: bool = False) -> RawHead:
    """Read what a head's directory says of itself, in whichever library's layout.

    Values of the wrong type are kept and named in ``problems``: a report can show them.

    Args:
        directory: holds ``config.json`` and safetensors files.
        pickles: open files that ``torch.save`` wrote, where there are no others.

    Raises:
        HeadError: it is no head (no config, no draft layer), a file is missing, damaged or not what it seems,
            only pickles are there (without ``pickles``), or two tensors have the same canonical name.
    """
    place = Path(directory)
    config = read_config(place)
    section = read_section(config, str(place))
    on_disk = find_tensors(place, pickles)
    kind, schema = _kind_of(place, section, on_disk)
    names: dict[str, Stored] = {}
    tensors: dict[str, TensorInfo] = {}
    for name, (stored, info) in on_disk.items():
        short = schema.canonical(name)
        if short in names:
            raise HeadError(f"{place}: {names[short].name} and {name} are two tensors of one name, {short}")
        names[short], tensors[short] = stored, info
    if section is not None:
        layout: Layout = "capture-hooks"
    elif "speculators_model_type" in config:
        layout = "speculators"
    elif any(name.startswith("midlayer.") for name in (n.removeprefix("model.") for n in on_disk)):
        layout = "eagle"
    elif any(name.startswith("midlayer.") for name in tensors):
        layout = "modelopt"
    else:
        raise HeadError(f"{place} has neither midlayer.* nor layers.0.*: it is no EAGLE-3 head")
    fields, problems = _fields(config)
    problems += schema.problems(fields)
    flags, unclear = _flags(schema, layout, config)
    return RawHead(
        layout,
        kind,
        schema,
        place,
        config,
        fields,
        flags,
        layer_ids(config),
        tensors,
        names,
        section,
        (*problems, *unclear),
    )


def _kind_of(place: Path, section: CaptureSection | None, names: Collection[str]) -> tuple[str, HeadSchema]:
    """The head provider whose file this is: the capture section names it, or its tensors show it.

    Raises:
        HeadError: it is of no kind that is installed.
    """
    heads = installed_heads()
    wanted = heads if section is None else {section.head: heads[section.head]}
    refusals = []
    for kind, provider in wanted.items():
        schema = provider.schema
        refusal = schema.refusal([schema.canonical(name) for name in names])
        if refusal is None:
            return kind, schema
        refusals.append(f"has {refusal}")
    raise HeadError(f"{place} {'; it '.join(refusals) or 'is of no kind of head that is installed'}")


def layer_ids(config: Mapping[str, Any]) -> dict[str, Any]:
    """Whatever is called ``...layer_ids``, at the top or one object down, by dotted key; null is absent.

    Every library's key ends so: ``eagle_config.eagle_aux_hidden_state_layer_ids`` (SGLang, SpecForge,
    ModelOpt), ``eagle_aux_hidden_state_layer_ids`` (vLLM, speculators), ``dflash_config.target_layer_ids``,
    ``dspark_target_layer_ids``, ``aux_hidden_states_layer_ids`` (AngelSlim), ``aux_hidden_state_layer_ids``.
    """
    return dict(_walk(config))


def _walk(config: Mapping[str, Any]) -> Iterator[tuple[str, Any]]:
    for key, value in config.items():
        if isinstance(value, dict) and key != "capture":
            yield from ((f"{key}.{k}", v) for k, v in value.items() if _is_ids(k, v))
        if _is_ids(key, value):
            yield key, value


def _is_ids(key: str, value: Any) -> bool:
    return key.endswith("layer_ids") and value is not None


def _fields(config: Mapping[str, Any]) -> tuple[dict[str, Any], list[str]]:
    """The fields of the draft at one level, and what is no object where one belongs."""
    nested, problems = config.get(NESTED), []
    if nested is not None and not isinstance(nested, dict):
        problems.append(f"{NESTED} is {_short(nested)}, not an object")
        nested = None
    top = {k: v for k, v in config.items() if k not in (NESTED, "capture") and not isinstance(v, dict)}
    top |= {k: config[k] for k in ("rope_parameters", "rope_scaling") if k in config}
    # Nested values describe the draft; speculators' own top-level keys have other names.
    return {**top, **(nested or {})}, problems


def _flags(schema: HeadSchema, layout: Layout, config: Mapping[str, Any]) -> tuple[HeadFlags, list[str]]:
    """The flags, each from the first place that says it; one that disagrees with it is a problem."""
    problems = []
    if config.get("eagle_config") is not None and not isinstance(config["eagle_config"], dict):
        problems.append(f"eagle_config is {_short(config['eagle_config'])}, not an object")

    def one(flag: str) -> bool | None:
        found: list[tuple[str, bool]] = []
        for place in schema.places[flag]:
            holder, _, key = place.rpartition(".")
            outer = config.get(holder) if holder else config
            value = outer.get(key) if isinstance(outer, Mapping) else None
            if layout == "eagle" and place == "norm_output":
                continue  # see `HeadFlags`
            if isinstance(value, bool):
                found.append((place, value))
            elif value is not None:
                problems.append(f"{place} is {_short(value)}, not true or false")
        for name, value in found[1:]:
            if value != found[0][1]:
                problems.append(f"{found[0][0]} is {_json(found[0][1])} and {name} is {_json(value)}")
        return found[0][1] if found else None

    norm_output = one("norm_output")
    others = (field.name for field in dataclasses.fields(HeadFlags) if field.name != "norm_output")
    return HeadFlags(norm_output=norm_output, **{name: one(name) for name in others}), problems


def _json(value: bool) -> str:
    return "true" if value else "false"


def _short(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= 60 else f"{text[:57]}..."


def find_tensors(directory: Path, pickles: bool = False) -> dict[str, tuple[Stored, TensorInfo]]:
    """Every tensor of a head by the name it has on disk; headers alone are read.

    Args:
        directory: the head's.
        pickles: open files that ``torch.save`` wrote, where there are no others.

    Raises:
        HeadError: there is no file or no single choice of files, one is damaged, a shard or a tensor of the
            index is missing, or there are only pickles and nobody asked for them to be opened.
    """
    if (directory / INDEX).exists():
        if (directory / WEIGHTS).exists():
            raise HeadError(f"{directory} holds {WEIGHTS} and {INDEX}; only one of them can be the head's")
        return _sharded(directory / INDEX, ".safetensors", read_header)
    if (directory / WEIGHTS).exists():
        return _one_file(directory / WEIGHTS)
    files = sorted(directory.glob("*.safetensors"))
    if len(files) == 1:
        return _one_file(files[0])
    if files:
        listed = ", ".join(path.name for path in files[:4])
        raise HeadError(
            f"{directory} holds {len(files)} safetensors files ({listed}) and no {INDEX} that says which "
            "tensor lies where; a shard's index was not copied along"
        )
    if found := sorted(path.name for pattern in _PICKLES for path in directory.glob(pattern)):
        if not pickles:
            raise HeadError(
                f"{directory} has no {WEIGHTS} but {', '.join(found[:3])}; pickles are opened only on "
                "request (--pickles), then with weights_only=True and after a look at what they name"
            )
        return _pickled(directory, found)
    raise HeadError(f"{directory} has no {WEIGHTS}: it is not a head, or was copied in part")


def _pickled(directory: Path, found: Sequence[str]) -> dict[str, tuple[Stored, TensorInfo]]:
    if (directory / PICKLE_INDEX).exists():
        return _sharded(directory / PICKLE_INDEX, ".bin", _pickled_header)
    if PICKLE not in found and len(found) > 1:
        raise HeadError(
            f"{directory} holds {len(found)} pickles ({', '.join(found[:4])}) and no {PICKLE} that would be "
            "the head's; leave only that one there"
        )
    path = directory / (PICKLE if PICKLE in found else found[0])
    return {name: (Stored(path, name), info) for name, info in _pickled_header(path).items()}


def _one_file(path: Path) -> dict[str, tuple[Stored, TensorInfo]]:
    return {name: (Stored(path, name), info) for name, info in read_header(path).items()}


def _sharded(
    path: Path, suffix: str, header: Callable[[Path], dict[str, TensorInfo]]
) -> dict[str, tuple[Stored, TensorInfo]]:
    """The tensors that an index names, in files of one kind beside it."""
    directory = path.parent
    weight_map = _weight_map(path)
    headers: dict[str, dict[str, TensorInfo]] = {}
    for shard in sorted(set(weight_map.values())):
        if Path(shard).name != shard or not shard.endswith(suffix):
            raise HeadError(f"{path} names {shard!r}; a shard is a {suffix[1:]} file in the same directory")
        if not (directory / shard).exists():
            raise HeadError(f"{path} names {shard}, which is missing: the head was copied in part")
        headers[shard] = header(directory / shard)
    if absent := sorted(name for name, shard in weight_map.items() if name not in headers[shard]):
        raise HeadError(f"{path} says that {absent[0]} lies in {weight_map[absent[0]]}, which lacks it")
    listed = {(shard, name) for name, shard in weight_map.items()}
    if extra := sorted({(s, n) for s, header in headers.items() for n in header} - listed):
        raise HeadError(f"{extra[0][0]} holds {extra[0][1]}, which {path} does not list there")
    return {
        name: (Stored(directory / shard, name), headers[shard][name]) for name, shard in weight_map.items()
    }


def _weight_map(path: Path) -> dict[str, str]:
    check_regular(path, HeadError)
    if path.stat().st_size > _LONGEST:
        raise HeadError(f"{path} has {path.stat().st_size} bytes; a head's index stays under {_LONGEST}")
    try:
        document: Any = json.loads(path.read_text(encoding="utf-8"))
    except (ValueError, RecursionError, OSError) as error:
        raise HeadError(f"{path} is not JSON: {str(error) or type(error).__name__}") from None
    found = document.get("weight_map") if isinstance(document, dict) else None
    if not isinstance(found, dict) or not found or not all(isinstance(v, str) for v in found.values()):
        raise HeadError(f"{path} has no weight_map from tensors to files")
    return found


def read_pickled(path: Path) -> dict[str, Tensor]:
    """The tensors of a file, mapped into memory; its pickle is looked through before anything is loaded.

    Raises:
        HeadError: the file is damaged, its pickle names more than tensors, or something in it is no tensor
            that a head can hold.
    """
    try:
        held = pickle_files.load(path)
    except StoreError as error:
        raise HeadError(str(error)) from None
    found: dict[str, Tensor] = {}
    for name, value in held.items():
        plain = isinstance(value, Tensor) and value.layout is torch.strided and value.dtype in _NAMES
        if not isinstance(name, str) or not plain:
            what = f"a tensor of {value.dtype}" if isinstance(value, Tensor) else f"a {type(value).__name__}"
            raise HeadError(
                f"{path} holds {what} under {str(name)[:60]!r}; a head's file holds its tensors alone"
            )
        found[name] = value.detach()
    total = sum(tensor.numel() * tensor.element_size() for tensor in found.values())
    if total > 2 * path.stat().st_size:  # two names may stand for one weight
        raise HeadError(f"{path} claims {total} bytes of tensors, more than the file holds")
    return found


def _pickled_header(path: Path) -> dict[str, TensorInfo]:
    """Shape and dtype of every tensor of such a file.

    Raises:
        HeadError: as `read_pickled`.
    """
    return {
        name: TensorInfo(tuple(tensor.shape), _NAMES[tensor.dtype])
        for name, tensor in read_pickled(path).items()
    }

"""Opening a target: its configuration, its class, its weights, its tokenizer and its processor.

A model is named by a local directory or a hub id: a checkpoint, or an adapter of PEFT on its base's
checkpoint.  Code that a checkpoint brings along is never run.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import torch

from ..errors import ModelError
from ..foreign import calling, told
from .adapter import merged

if TYPE_CHECKING:
    from torch import nn

#: PEFT's own name for an adapter's settings (peft 0.21, utils/constants.py).
ADAPTER_CONFIG: Final = "adapter_config.json"
#: What a model's matrices can be multiplied in on every device.
_DTYPES: Final = ("float32", "bfloat16", "float16", "float64")
#: How the files of a tokenizer begin, in all of transformers' formats; tiktoken's end in their name.
_TOKENIZER_FILES: Final = ("tokenizer", "vocab", "spiece", "sentencepiece", "tekken", "merges")


@dataclass(frozen=True, slots=True)
class Location:
    """A model as named.

    Attributes:
        name: what was given: a directory or a hub id.
        base: the checkpoint with the configuration and the weights.
        adapter: the directory of the adapter that belongs on top, or None.
    """

    name: str
    base: str
    adapter: str | None


def locate(model: str) -> Location:
    """Look at a directory; any other name is a checkpoint's hub id.

    A directory with both a ``config.json`` and an adapter is its own base, as in transformers.

    Raises:
        ModelError: an adapter that does not say what it was trained on, or whose base is not there.
    """
    directory = Path(model)
    settings = directory / ADAPTER_CONFIG
    if not settings.is_file():
        return Location(model, model, None)
    if (directory / "config.json").is_file():
        return Location(model, model, model)
    try:
        base = json.loads(settings.read_text(encoding="utf-8"))["base_model_name_or_path"]
    except (OSError, ValueError, KeyError, TypeError, RecursionError) as error:
        raise ModelError(f"cannot read the adapter's settings {settings}: {error!r}") from None
    if not isinstance(base, str) or not base:
        raise ModelError(
            f"{model} is an adapter that does not say which model it was trained on: set "
            f"base_model_name_or_path in {settings} to that model's directory"
        )
    path = Path(base)
    if (path / ADAPTER_CONFIG).is_file():
        raise ModelError(f"{model} is an adapter of {base}, itself an adapter: merge that one into its base")
    if base.startswith((".", "/", "~")) and not path.is_dir():
        raise ModelError(
            f"{model} is an adapter of {base}, and there is no such directory: set "
            f"base_model_name_or_path in {settings} to where that model lies"
        )
    return Location(model, base, model)


def load_config(model: str) -> Any:
    """The text configuration of the model alone.

    Raises:
        ModelError: when there is no such model.
    """
    return load_whole_config(model).get_text_config()


def load_whole_config(model: str) -> Any:
    """The whole configuration of the model, whose ``model_type`` is the one that servers go by.

    Raises:
        ModelError: when transformers is missing, or there is no readable config.
    """
    transformers = _transformers()
    base = locate(model).base
    with _reading(model):
        return transformers.AutoConfig.from_pretrained(base, trust_remote_code=False)


def load_generation_config(model: str) -> dict[str, Any] | None:
    """What the model's ``generation_config.json`` says beyond transformers' defaults; None where it has none.

    Raises:
        ModelError: when there is no such model, or the file cannot be read.
    """
    place = Path(locate(model).base)
    if place.is_dir() and not (place / "generation_config.json").exists():
        return None
    try:
        found: dict[str, Any] = _transformers().GenerationConfig.from_pretrained(str(place)).to_diff_dict()
    except (OSError, ValueError, TypeError, AttributeError) as error:
        if not place.is_dir():
            return None  # a model of the hub that has none
        raise ModelError(f"cannot read {place / 'generation_config.json'}: {error}") from None
    return found


def load_target(model: str, dtype: str = "auto", device: str | None = None) -> nn.Module:
    """The target, in eval mode, on this process's device (a GPU if there is one and none is named).

    A multimodal model is loaded whole.  An adapter's directory is loaded as its base with the adapter merged
    into the weights: the model that an engine serves once the merged weights are saved.

    Args:
        model: a local directory or a hub id.
        dtype: ``auto`` (as stored), float32, bfloat16, float16 or float64.
        device: as torch names it.

    Raises:
        ModelError: when there is no such model or device, the checkpoint is damaged or incomplete, or the
            model cannot be run in that dtype.
    """
    if dtype != "auto" and dtype not in _DTYPES:
        raise ModelError(f"a model cannot be run in {dtype!r}: give auto, {', '.join(_DTYPES)}")
    device = _usable(device)
    location = locate(model)
    config = load_whole_config(model)
    with _reading(model), _quietly():
        loaded = _with_weights(location, config, dtype)
        if location.adapter is not None:
            loaded = merged(loaded, location.adapter)
        return loaded.to(device).eval()


def skeleton(name: str) -> nn.Module:
    """The model of a local directory or hub id, on the meta device, in eval mode: every module, no values.

    Raises:
        ModelError: when transformers is missing, there is no readable config, or it names no language model.
    """
    config = load_whole_config(name)
    with _reading(name), torch.device("meta"):
        chosen, settings = _model_class(config, name)
        built: nn.Module = chosen._from_config(settings)
        return built.eval()


def load_tokenizer(model: str) -> Any:
    """The model's tokenizer, or None where it has none: token ids need none, and readers of text say so.

    Raises:
        ModelError: its files are there and cannot be read.
    """
    location, auto = locate(model), _transformers().AutoTokenizer
    own = location.adapter is not None and _has_tokenizer(Path(location.adapter))
    place = model if own else location.base
    try:
        found = auto.from_pretrained(place, trust_remote_code=False)
    except Exception as error:  # of any class, as a damaged model's are
        if not _has_tokenizer(Path(place)):
            return None
        raise ModelError(f"cannot load the tokenizer of {model}: {told(error)}") from error
    # For some families transformers makes one that knows its special tokens alone where there are no files.
    if not set(found.get_vocab()) <= set(found.all_special_tokens):
        return found
    if not _has_tokenizer(Path(place)):
        return None
    raise ModelError(f"cannot load the tokenizer of {model}: its files hold no vocabulary")


def load_processor(model: str) -> Any:
    """What makes a multimodal model's inputs of text and images; None for a model of text alone.

    Raises:
        ModelError: there is no such model, or its processor cannot be read.
    """
    if not _is_multimodal(load_whole_config(model)):
        return None
    with _reading(model):
        return _transformers().AutoProcessor.from_pretrained(locate(model).base, trust_remote_code=False)


def context_length(model: Any) -> int | None:
    """Tokens a model was made to read; None where its configuration does not say.

    A dynamic RoPE stretches ``max_position_embeddings`` by its factor (transformers 5.24,
    modeling_rope_utils.py).

    Args:
        model: a model, or its configuration.
    """
    config = getattr(model, "config", model)
    text = config.get_text_config(decoder=True) if hasattr(config, "get_text_config") else config
    length = getattr(text, "max_position_embeddings", None)
    if not length:
        return None
    rope = getattr(text, "rope_parameters", None) or {}
    kinds = [rope, *(kind for kind in rope.values() if isinstance(kind, dict))]
    factors = [kind["factor"] for kind in kinds if kind.get("rope_type") == "dynamic" and "factor" in kind]
    return int(length * min(factors, default=1))


def _model_class(config: Any, name: str) -> tuple[Any, Any]:
    """The class of a language model and the configuration it is built with.

    The class that the checkpoint names, where it is one that generates; else the one registered for the type
    as a causal language model, else as a multimodal one (images and text to text).

    Raises:
        ModelError: this transformers has no language model of the type.
    """
    transformers = _transformers()
    for architecture in getattr(config, "architectures", None) or ():
        found = getattr(transformers, str(architecture), None)
        if found is not None and hasattr(found, "prepare_inputs_for_generation"):
            return found, _of_class(found, config)
    for auto in (transformers.AutoModelForCausalLM, transformers.AutoModelForImageTextToText):
        if type(config) in auto._model_mapping:
            found = auto._model_mapping[type(config)]
            found = found[0] if isinstance(found, list | tuple) else found
            return found, _of_class(found, config)
    raise ModelError(
        f"model {name!r} is of type {config.model_type!r}, for which this transformers "
        f"({transformers.__version__}) has no language model"
    )


def _is_multimodal(config: Any) -> bool:
    """Whether a configuration is of a model that reads images beside text."""
    return type(config) in _transformers().AutoModelForImageTextToText._model_mapping


def _of_class(found: Any, config: Any) -> Any:
    """The part of a multimodal configuration that a class of its text decoder alone is built with."""
    text = config.get_text_config()
    alone = text is not config and getattr(found, "config_class", None) is type(text)
    return text if alone else config


def _with_weights(location: Location, config: Any, dtype: str) -> nn.Module:
    """The base checkpoint's model; every weight is the checkpoint's.

    Raises:
        ModelError: it lacks some, or its own dtype is only for storing.
    """
    found, settings = _model_class(config, location.name)
    stored = str(getattr(settings, "dtype", None) or "float32").removeprefix("torch.")
    if dtype == "auto" and stored not in _DTYPES:
        raise ModelError(
            f"the model {location.name} is stored in {stored}, in which it cannot be run: give bfloat16, say"
        )
    loaded, info = found.from_pretrained(
        location.base,
        config=settings,
        dtype=dtype,
        output_loading_info=True,
        trust_remote_code=False,
        # Keeps transformers from looking for an adapter: it would inject one unmerged.
        adapter_kwargs={"subfolder": "no adapter"},
    )
    if missing := sorted(info["missing_keys"]):
        raise ModelError(
            f"cannot load the model {location.name}: its checkpoint lacks {len(missing)} of the weights of "
            f"{type(loaded).__name__}, {missing[0]} among them"
        )
    return loaded  # type: ignore[no-any-return]  # transformers gives no types


def _usable(device: str | None) -> str:
    """The device, tried out; this process's own where none is named."""
    if device is None:
        device = f"cuda:{os.environ.get('LOCAL_RANK', '0')}" if torch.cuda.is_available() else "cpu"
    with calling(f"cannot use the device {device!r}", ModelError):
        if torch.device(device).type == "cuda":
            torch.cuda.set_device(torch.device(device).index or 0)
        torch.empty(0, device=device)
    return device


def _has_tokenizer(directory: Path) -> bool:
    if not directory.is_dir():
        return False
    names = [path.name for path in directory.iterdir()]
    return any(name.startswith(_TOKENIZER_FILES) or name.endswith(".tiktoken") for name in names)


def _reading(model: str) -> AbstractContextManager[None]:
    """A block in which transformers reads what ``model`` names; its errors become a `ModelError`.

    Raises:
        ModelError: for whatever a missing, damaged or unknown model makes these libraries raise.
    """
    return calling(f"cannot load the model {model}", ModelError)


def _transformers() -> Any:
    """The module ``transformers``.

    Raises:
        ModelError: it is not installed.
    """
    try:
        import transformers
    except ModuleNotFoundError as error:
        if error.name != "transformers":
            raise
        raise ModelError("reading a model needs transformers: pip install transformers") from None
    return transformers


@contextmanager
def _quietly() -> Iterator[None]:
    """Turn off transformers' progress bar and load report: what is wrong with a checkpoint is raised."""
    from transformers.utils import logging

    level, bar = logging.get_verbosity(), logging.is_progress_bar_enabled()
    logging.set_verbosity_error()  # type: ignore[no-untyped-call]  # transformers gives no types
    logging.disable_progress_bar()  # type: ignore[no-untyped-call]  # as above
    try:
        yield
    finally:
        logging.set_verbosity(level)
        if bar:
            logging.enable_progress_bar()  # type: ignore[no-untyped-call]  # as above

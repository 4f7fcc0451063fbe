"""Loading a target for this process: the model with its weights, its tokenizer, its processor."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import torch

from ..errors import ModelError
from ..foreign import calling, told
from .adapter import merged
from .location import Location, locate
from .reading import reading, transformers_here
from .skeleton import is_multimodal, model_class, read_config

if TYPE_CHECKING:
    from torch import nn

#: What a model's matrices can be multiplied in on every device.
_DTYPES: Final = ("float32", "bfloat16", "float16", "float64")
#: How the files of a tokenizer begin, in all of transformers' formats; tiktoken's end in their name.
_TOKENIZER_FILES: Final = ("tokenizer", "vocab", "spiece", "sentencepiece", "tekken", "merges")


def load_config(model: str) -> Any:
    """The text configuration of the model alone.

    Raises:
        ModelError: when there is no such model.
    """
    return load_whole_config(model).get_text_config()


def load_whole_config(model: str) -> Any:
    """The whole configuration of the model, whose ``model_type`` is the one that servers go by.

    Raises:
        ModelError: when there is no such model.
    """
    return read_config(model)


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
    config = read_config(model)
    with reading(model), _quietly():
        loaded = _with_weights(location, config, dtype)
        if location.adapter is not None:
            loaded = merged(loaded, location.adapter)
        return loaded.to(device).eval()


def load_tokenizer(model: str) -> Any:
    """The model's tokenizer, or None where it has none: token ids need none, and readers of text say so.

    Raises:
        ModelError: its files are there and cannot be read.
    """
    location, auto = locate(model), transformers_here().AutoTokenizer
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
    if not is_multimodal(read_config(model)):
        return None
    with reading(model):
        return transformers_here().AutoProcessor.from_pretrained(locate(model).base, trust_remote_code=False)


def _usable(device: str | None) -> str:
    """The device, tried out; this process's own where none is named."""
    if device is None:
        device = f"cuda:{os.environ.get('LOCAL_RANK', '0')}" if torch.cuda.is_available() else "cpu"
    with calling(f"cannot use the device {device!r}", ModelError):
        if torch.device(device).type == "cuda":
            torch.cuda.set_device(torch.device(device).index or 0)
        torch.empty(0, device=device)
    return device


def _with_weights(location: Location, config: Any, dtype: str) -> nn.Module:
    """The base checkpoint's model; every weight is the checkpoint's.

    Raises:
        ModelError: it lacks some, or its own dtype is only for storing.
    """
    found, settings = model_class(config, location.name)
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


def _has_tokenizer(directory: Path) -> bool:
    if not directory.is_dir():
        return False
    names = [path.name for path in directory.iterdir()]
    return any(name.startswith(_TOKENIZER_FILES) or name.endswith(".tiktoken") for name in names)


@contextmanager
def _quietly() -> Iterator[None]:
    """Without transformers' progress bar and load report: what is wrong with a checkpoint is raised."""
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

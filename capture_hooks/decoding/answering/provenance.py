"""What answers come from: how the target chooses tokens (its ``generation_config``), and its files."""

from __future__ import annotations

import hashlib
from dataclasses import replace
from pathlib import Path
from typing import Final

from ...errors import DecodingError
from ...target import load_config, load_generation_config, load_whole_config, locate
from ..contract import LEAST_TEMPERATURE, Sampling

#: Of a generation config: what every engine does alike, and what concerns no choice of a token.
_CHOICES: Final = ("temperature", "top_k", "top_p", "min_p", "repetition_penalty")
_OTHER: Final = (
    *("do_sample", "max_length", "max_new_tokens", "bos_token_id", "eos_token_id", "pad_token_id"),
    *("transformers_version", "use_cache", "cache_implementation", "decoder_start_token_id"),
    *("_from_model_config", "return_dict_in_generate", "output_attentions", "output_hidden_states"),
)
#: Bytes read at both ends of a file.
_ENDS: Final = 1 << 16


def sampling_of(
    model: str,
    *,
    temperature: float | None = None,
    top_k: int | None = None,
    top_p: float | None = None,
) -> tuple[Sampling, tuple[str, ...]]:
    """The target's sampling, with what is given here in place of its own, and settings that are left out.

    The second are those of its generation config that engines do not share, such as ``no_repeat_ngram_size``:
    servers do not read them, so no engine here does.

    Args:
        model: a local directory or a hub id.
        temperature: 0 for the most probable token always.
        top_k: sample among so many tokens.
        top_p: sample among the most probable tokens that hold this much probability.

    Raises:
        ModelError: there is no such model.
        DecodingError: a value that means nothing, or no token that ends an answer.
    """
    own = load_generation_config(model) or {}
    ends = own.pop("eos_token_id", None)
    ends = ends if ends is not None else getattr(load_config(model), "eos_token_id", None)
    ends = [ends] if isinstance(ends, int) else list(ends or ())
    found = {name: own[name] for name in _CHOICES if own.get(name) is not None}
    if not own.get("do_sample"):
        found = {name: value for name, value in found.items() if name == "repetition_penalty"}
        if temperature:
            found["temperature"] = temperature
    elif "temperature" not in found:
        found["temperature"] = 1.0
    given = {"temperature": temperature, "top_k": top_k, "top_p": top_p}
    found |= {name: value for name, value in given.items() if value is not None}
    if not found.get("temperature") and (idle := [name for name in ("top_k", "top_p") if given[name]]):
        raise DecodingError(f"{idle[0]} {given[idle[0]]} changes nothing without a temperature; give one too")
    found["top_k"] = found.get("top_k") or None
    if not ends:
        raise DecodingError(
            f"{model} names no token that ends an answer: set eos_token_id in its generation_config.json"
        )
    sampling = Sampling(**found, ends=tuple(dict.fromkeys(ends)))
    _check(sampling)
    if not sampling.temperature:
        sampling = replace(Sampling(ends=sampling.ends), repetition_penalty=sampling.repetition_penalty)
    return sampling, tuple(sorted(own.keys() - {*_CHOICES, *_OTHER}))


def describe(sampling: Sampling) -> str:
    """The sampling settings as text for a person."""
    if not sampling.temperature:
        text = "greedy"
    else:
        text = f"sampled at temperature {sampling.temperature:g}"
        text += f", top-k {sampling.top_k}" if sampling.top_k else ""
        text += f", top-p {sampling.top_p:g}" if sampling.top_p < 1 else ""
        text += f", min-p {sampling.min_p:g}" if sampling.min_p else ""
    penalty = sampling.repetition_penalty
    return text + (f", repetition penalty {penalty:g}" if penalty != 1 else "")


def _check(sampling: Sampling) -> None:
    """Every value has a meaning.

    Raises:
        DecodingError: naming one that has none.
    """
    bounds = {
        "temperature": (0, 100, sampling.temperature),
        "top_p": (1e-6, 1, sampling.top_p),
        "min_p": (0, 1, sampling.min_p),
        "top_k": (1, 2**31, sampling.top_k if sampling.top_k is not None else 1),
    }
    if 0 < sampling.temperature < LEAST_TEMPERATURE:
        raise DecodingError(f"temperature {sampling.temperature} is too small to divide by; 0 is greedy")
    for name, (low, high, value) in bounds.items():
        if not low <= value <= high:
            raise DecodingError(f"{name} {value} is not between {low:g} and {high:g}")
    if not sampling.repetition_penalty > 0:
        raise DecodingError(f"repetition_penalty {sampling.repetition_penalty} is not above 0")


def model_digest(model: str) -> str:
    """SHA-256 of a checkpoint's files, an adapter's too: of their names, sizes and ends.

    For a name on the hub, of its configuration, which says its revision.

    Raises:
        ModelError: there is no such model.
    """
    config = load_whole_config(model)
    location = locate(model)
    digest = hashlib.sha256()
    for place in (location.base, location.adapter):
        if place is None:
            continue
        if not Path(place).is_dir():
            digest.update(
                f"{place} {getattr(config, '_commit_hash', None)} {config.to_json_string()}".encode()
            )
            continue
        for path in sorted(file for file in Path(place).iterdir() if file.is_file()):
            size = path.stat().st_size
            digest.update(f"{path.name} {size}\n".encode())
            with path.open("rb") as file:
                digest.update(file.read(_ENDS))
                file.seek(max(0, size - _ENDS))
                digest.update(file.read(_ENDS))
    return digest.hexdigest()

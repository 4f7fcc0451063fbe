"""The formats that come with the core, and what a dump is, says of itself, and does not say."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import Final

from ...errors import StoreError
from .contract import DumpFormat, Facts
from .modelopt import ModelOpt
from .ours import CaptureHooks
from .specforge import SpecForge
from .speculators import Speculators, SpeculatorsFiles
from .vllm import VLLM

#: The formats that come with the core, by name.
FORMATS: Final[Mapping[str, DumpFormat]] = MappingProxyType(
    {
        one.name: one
        for one in (
            CaptureHooks(),
            ModelOpt(),
            SpecForge(),
            SpecForge(compressed=True),
            Speculators(),
            SpeculatorsFiles(0),
            SpeculatorsFiles(1),
            VLLM(),
        )
    }
)
_NO_POINTS = "--spec POINTS in the order of the slots, or --ids IDS --written-for CONVENTION"


@dataclass(frozen=True, slots=True)
class DumpDescription:
    """A dump as far as it can be known without loading a pickle.

    Attributes:
        format: name of its format.
        library: whose format it is, with the versions that were read.
        says: what the dump itself, or its library's own code, says: name and value, in order.
        silent: what it does not say: name, and how to state it.
    """

    format: str
    library: str
    says: tuple[tuple[str, str], ...]
    silent: tuple[tuple[str, str], ...]


def recognised(path: Path, formats: Mapping[str, DumpFormat] = FORMATS) -> DumpFormat:
    """The format of the dump in ``path``, judged without loading any pickle.

    Raises:
        StoreError: it is of none of ``formats``, of several, or damaged.
    """
    found = [candidate for candidate in formats.values() if path.is_dir() and candidate.recognises(path)]
    if len(found) == 1:
        return found[0]
    if found:
        names = ", ".join(candidate.name for candidate in found)
        raise StoreError(f"{path} may be a dump of several formats ({names}); say which (--from)")
    what = "is of no known format" if path.is_dir() else "is not a directory"
    raise StoreError(f"{path} {what}: a dump is a directory of one of the formats {', '.join(formats)}")


def describe(
    path: Path, *, pickles: bool = False, formats: Mapping[str, DumpFormat] = FORMATS
) -> DumpDescription:
    """Describe the dump in the directory ``path``.

    Args:
        path: the directory.
        pickles: open .pt and .ckpt files too, as `convert_dump` would.
        formats: what it may be.

    Raises:
        StoreError: it is a dump of none of these formats, or damaged.
    """
    found = recognised(path, formats)
    meaning = found.meaning
    facts, sequences = None, None
    if pickles or not found.pickles:
        opened = found.open(path)
        facts, sequences = opened.facts, len(opened)
    return DumpDescription(
        found.name,
        f"{meaning.library} {meaning.versions}",
        (*_said(found, facts, sequences),),
        (*_unsaid(found, facts),),
    )


def _said(found: DumpFormat, facts: Facts | None, sequences: int | None) -> Iterator[tuple[str, str]]:
    meaning = found.meaning
    if facts is not None:
        yield "sequences", str(sequences)
        yield "dtype", facts.dtype
        count = "" if facts.slots is None else f" ({facts.slots} states of {facts.hidden})"
        yield "inputs", f"{facts.width} columns{count}"
        if facts.spec is not None:
            yield "points", str(facts.spec)
    if facts is not None and facts.last is not None:
        yield "last hidden state", f"{facts.last}, as the dump itself says"
    elif meaning.last is not None:
        yield "last hidden state", f"{meaning.last}: {meaning.about_last}"
    if meaning.mask_lag is not None:
        lag = f"-{meaning.mask_lag}" if meaning.mask_lag else ""
        yield (
            "loss mask",
            f"its trainer weights the prediction of x[p] by the mark of x[p{lag}]: {meaning.about_mask}",
        )
    if facts is not None:
        yield from facts.says.items()


def _unsaid(found: DumpFormat, facts: Facts | None) -> Iterator[tuple[str, str]]:
    meaning = found.meaning
    if facts is None:
        yield "what its files hold", "they are pickles, which are opened only on request: --pickles"
    if not found.says_points:
        yield "points", _NO_POINTS
        yield "target model", "--target MODEL"
    if meaning.last is None and (facts is None or facts.last is None):
        yield "last hidden state", f"--last normed or --last unnormed ({meaning.about_last})"
    if meaning.mask_lag is None:
        yield "loss mask", "--masks all, or --masks DATA"

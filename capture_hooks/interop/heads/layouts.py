"""The layouts as objects: what each is called, and how a head is written in it."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Final, Protocol

from ...conventions import Conventions
from ...errors import HeadError
from .contract import Layout
from .draft import Draft, Written
from .inputs import chosen_convention
from .norms import twice
from .plain import write_plain
from .speculators import write_speculators


class Writer(Protocol):
    """Writes a settled head, its inputs in ascending depth, in one layout's names."""

    @property
    def name(self) -> Layout: ...

    def write(self, draft: Draft, unverified: bool, conventions: Conventions) -> Written:
        """The tensors and the config.

        Raises:
            ConventionError: the layout's ids cannot be written for this family.
        """
        ...


@dataclass(frozen=True, slots=True)
class Eagle:
    """EAGLE and SpecForge: ``midlayer.*``, ``t2d``; nested ids are SGLang's, top-level ones vLLM's."""

    name: Layout = "eagle"

    def write(self, draft: Draft, unverified: bool, conventions: Conventions) -> Written:
        nested = chosen_convention("sglang", draft.target.family, unverified, conventions)
        return write_plain(draft, self.name, "midlayer", nested, conventions, masks=True, own={})


@dataclass(frozen=True, slots=True)
class ModelOpt:
    """ModelOpt's export: ``layers.0.*``, no ``t2d``; nested ids are its own, top-level ones vLLM's."""

    name: Layout = "modelopt"

    def write(self, draft: Draft, unverified: bool, conventions: Conventions) -> Written:
        nested = chosen_convention("modelopt", draft.target.family, unverified, conventions)
        own = {
            "use_input_layernorm_in_first_layer": True,
            "use_last_layernorm": True,
            "use_mtp_layernorm": False,
            "next_layer_regular": True,
            **draft.carried.get("modelopt", {}),
        }
        written = write_plain(draft, self.name, "layers.0", nested, conventions, masks=False, own=own)
        told = any("input_layernorm(h)" in note for note in draft.notes)
        return written if told else replace(written, notes=(*written.notes, *twice(draft.tensors)))


@dataclass(frozen=True, slots=True)
class Speculators:
    """speculators: ``layers.0.*``, ``t2d``; nested Llama fields, top-level ids, a section on the verifier."""

    name: Layout = "speculators"

    def write(self, draft: Draft, unverified: bool, conventions: Conventions) -> Written:
        chosen = chosen_convention("speculators", draft.target.family, unverified, conventions)
        return write_speculators(draft, chosen, conventions)


WRITERS: Final[dict[str, Writer]] = {writer.name: writer for writer in (Eagle(), ModelOpt(), Speculators())}
#: Other names of a layout.
_ALIASES: Final = {"specforge": "eagle", "sglang": "capture-hooks", "vllm": "capture-hooks"}


def layout_named(name: str) -> Layout:
    """A layout by its name or by that of a tool that reads it.

    Raises:
        HeadError: there is none; the message lists them.
    """
    known: dict[str, Layout] = {"capture-hooks": "capture-hooks", **{n: w.name for n, w in WRITERS.items()}}
    found = known.get(_ALIASES.get(name, name))
    if found is None:
        listed = ", ".join([*known, *(f"{alias} ({layout})" for alias, layout in _ALIASES.items())])
        raise HeadError(f"no layout of heads is called {name!r}; there are {listed}")
    return found
